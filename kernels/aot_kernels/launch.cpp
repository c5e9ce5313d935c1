// Runs a plan. A launch costs the host little: no allocation, lock or text unless it fails.
#include "twinop/aot_kernels/launch.h"

#include <stdexcept>
#include <string>

#include "twinop/aot_kernels/parameters.h"

namespace twinop::aot_kernels {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kMaxBlocks[] = {INT32_MAX, 65535, 65535};  // of a grid in x, y and z

[[noreturn, gnu::cold]] void Fail(const std::string& message) { throw std::runtime_error(message); }

std::string GridText(const std::int64_t* grid) {
  return "(" + std::to_string(grid[0]) + ", " + std::to_string(grid[1]) + ", " +
         std::to_string(grid[2]) + ")";
}

// Adds an aligned block to the scratch memory and returns its offset.
std::int64_t Reserve(std::int64_t bytes, std::int64_t* total) {
  const std::int64_t begin = *total;
  std::int64_t end = 0;
  if (bytes < 0 || __builtin_add_overflow(begin, bytes, &end) || end > INT64_MAX - kAlignment)
    Fail("a temporary tensor of the launch has " + std::to_string(bytes) + " bytes");
  *total = (end + kAlignment - 1) / kAlignment * kAlignment;
  return begin;
}

bool FitsDTypes(const std::vector<std::int32_t>& dtypes, const twinop_call& call) {
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    if (call.inputs[i].present != 0 && call.inputs[i].dtype != dtypes[i]) return false;
  return true;
}

bool FitsRanks(const std::vector<std::int8_t>& ranks, const twinop_call& call) {
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const twinop_tensor& input = call.inputs[i];
    if (input.present == 0 ? ranks[i] >= 0 : static_cast<std::int64_t>(input.rank) != ranks[i])
      return false;
  }
  return true;
}

bool Holds(const std::vector<Expression>& guards, const Facts& facts) {
  for (const Expression& guard : guards) {
    const Value value = Evaluate(guard, facts);
    if (value.AsDouble() == 0) return false;
  }
  return true;
}

std::size_t FindCombination(const Op& op, const twinop_call& call) {
  std::size_t c = 0;
  while (c < op.combinations.size() && !FitsDTypes(op.combinations[c], call)) ++c;
  return c;  // the adapters have refused inputs that fit none
}

const Plan& FindPlan(const Op& op, const twinop_call& call, const Facts& facts) {
  const std::size_t combination = FindCombination(op, call);
  bool ranks_fit = false;
  for (const Plan& plan : op.plans) {
    if (plan.combination != combination || !FitsRanks(plan.ranks, call)) continue;
    if (Holds(plan.guards, facts)) return plan;
    ranks_fit = true;
  }
  if (ranks_fit)
    Fail(
        "the launcher was traced for other sizes or attributes. Build the library again with "
        "samples that have these");
  std::string known;
  for (const Plan& plan : op.plans) {
    if (plan.combination != combination) continue;
    std::string ranks;
    for (const int rank : plan.ranks)
      ranks += (ranks.empty() ? "" : ", ") + (rank < 0 ? "absent" : std::to_string(rank));
    if (known.find("(" + ranks + ")") == std::string::npos) known += " (" + ranks + ")";
  }
  Fail("the launcher was traced for inputs of other ranks:" + (known.empty() ? " none" : known) +
       ". Build the library again with samples of these ranks");
}

// One run of a plan.
class Run {
 public:
  Run(const twinop_call& call, const State& state)
      : call_(call),
        payload_(*state.payload),
        device_(*state.device),
        driver_(GetDriver()),
        facts_{call.inputs, call.attributes, device_.architecture},
        plan_(FindPlan(*state.op, call, facts_)) {}

  // Lays out the temporary tensors and, behind them, the kernels' own scratch memory.
  std::int64_t ScratchBytes() {
    LayOut();
    for (const auto& step : plan_.steps) {
      const auto* launch = std::get_if<Launch>(&step);
      if (launch == nullptr || launch->scratch_per_program == 0) continue;
      std::int64_t grid[3];
      if (Grid(*launch, grid)) KernelScratch(*launch, grid);
    }
    return scratch_;
  }

  void Launches() {
    for (const Limit& limit : plan_.limits) CheckLimit(limit);
    LayOut();
    const CurrentContext current(driver_, device_.context);
    for (const auto& step : plan_.steps) {
      if (const auto* launch = std::get_if<Launch>(&step))
        LaunchKernel(*launch);
      else if (const auto* fill = std::get_if<Fill>(&step))
        FillBytes(*fill);
      else
        Fail(std::get<Refuse>(step).message);
    }
  }

 private:
  void LayOut() {
    for (std::size_t i = 0; i < plan_.temporaries.size(); ++i)
      temporaries_[i] = Reserve(EvaluateInt(plan_.temporaries[i], facts_), &scratch_);
  }

  // Returns the offset of the memory that the kernel itself asks for.
  std::int64_t KernelScratch(const Launch& launch, const std::int64_t* grid) {
    auto bytes = static_cast<std::int64_t>(launch.scratch_per_program);
    for (int i = 0; i < 3; ++i)
      if (__builtin_mul_overflow(bytes, grid[i], &bytes)) bytes = -1;
    return Reserve(bytes, &scratch_);
  }

  // Returns whether there is anything to launch.
  bool Grid(const Launch& launch, std::int64_t* grid) const {
    bool any = true;
    for (int i = 0; i < 3; ++i) {
      grid[i] = EvaluateInt(launch.grid[i], facts_);
      any = any && grid[i] != 0;
    }
    return any;
  }

  void CheckLimit(const Limit& limit) const {
    const bool is_input = limit.base == Base::kInput;
    const twinop_tensor& tensor = (is_input ? call_.inputs : call_.outputs)[limit.index];
    if (tensor.present == 0 || tensor.numel <= limit.elements) return;
    Fail(TakenBy(limit) + (is_input ? "input " : "output ") + std::to_string(limit.index) +
         " has " + std::to_string(tensor.numel) +
         " elements; the kernel's offsets of 32 bits reach " + std::to_string(limit.elements) +
         ". Compute offsets in 64 bits in the kernel: "
         "tl.program_id(0).to(tl.int64)");
  }

  // Names the first kernel that takes a tensor.
  std::string TakenBy(const Limit& limit) const {
    for (const auto& step : plan_.steps) {
      const auto* launch = std::get_if<Launch>(&step);
      if (launch == nullptr) continue;
      for (const Argument& argument : launch->arguments)
        if (argument.base == limit.base && argument.index == limit.index)
          return std::string(payload_.kernels[launch->variants.back().kernel].label) + ": ";
    }
    return "";
  }

  std::uint64_t Address(const Argument& argument) const {
    const void* base = argument.base == Base::kInput    ? call_.inputs[argument.index].data
                       : argument.base == Base::kOutput ? call_.outputs[argument.index].data
                                                        : call_.scratch;
    if (base == nullptr) return 0;
    auto offset = static_cast<std::uint64_t>(EvaluateInt(argument.value, facts_));
    if (argument.base == Base::kTemporary)
      offset += static_cast<std::uint64_t>(temporaries_[argument.index]);
    return reinterpret_cast<std::uintptr_t>(base) + offset;
  }

  void FillBytes(const Fill& fill) const {
    const std::int64_t bytes = EvaluateInt(fill.bytes, facts_);
    if (bytes <= 0) return;
    Check(driver_.MemsetD8Async(Address(fill.pointer), fill.value, static_cast<std::size_t>(bytes),
                                call_.context->stream),
          "filling a tensor");
  }

  void LaunchKernel(const Launch& launch) {
    std::int64_t grid[3];
    if (!Grid(launch, grid)) return;
    Value values[kMaxLaunchArguments];
    for (std::size_t i = 0; i < launch.arguments.size(); ++i) {
      const Argument& argument = launch.arguments[i];
      if (argument.base == Base::kScalar) {
        values[i] = Evaluate(argument.value, facts_);
      } else {
        values[i].is_float = false;
        values[i].integer = static_cast<std::int64_t>(Address(argument));
      }
    }
    const Variant& variant = ChooseVariant(launch, values);
    const Kernel& kernel = payload_.kernels[variant.kernel];

    std::uint64_t storage[kMaxLaunchArguments];
    void* parameters[kMaxLaunchArguments + 2];
    std::size_t count = 0;
    for (const Parameter& parameter : variant.parameters) {
      parameters[count] = &storage[count];
      StoreParameter(parameter, launch, values, kernel.label, parameters[count++]);
    }
    // Triton's two: the scratch memory of the kernel, and that of its profiler.
    std::uint64_t trailing[2] = {0, 0};
    if (launch.scratch_per_program > 0)
      trailing[0] = reinterpret_cast<std::uintptr_t>(call_.scratch) +
                    static_cast<std::uint64_t>(KernelScratch(launch, grid));
    for (unsigned i = 0; i < kernel.scratch_pointers; ++i) parameters[count++] = &trailing[i];

    LaunchAttribute attributes[4];
    LaunchConfig config{};
    const LoadedKernel& loaded = device_.kernels[variant.kernel];
    if (loaded.function == nullptr)
      Fail(std::string(kernel.label) + ": not loaded for these dtypes");
    Configure(launch, kernel, *loaded.image, grid, &config, attributes);
    Check(driver_.LaunchKernelEx(&config, loaded.function, parameters, nullptr), "launching ",
          kernel.label);
  }

  void Configure(const Launch& launch, const Kernel& kernel, const Image& image,
                 const std::int64_t* grid, LaunchConfig* config,
                 LaunchAttribute* attributes) const {
    for (int i = 0; i < 3; ++i) {
      const std::int64_t most = kMaxBlocks[i] / (i == 0 ? kernel.cluster : 1);
      if (grid[i] < 0 || grid[i] > most)
        Fail(std::string(kernel.label) + ": its grid would be " + GridText(grid) +
             "; a GPU launches at most (2147483647, 65535, 65535) blocks. Give each program more "
             "to do, or put the large dimension first");
      config->grid[i] = static_cast<unsigned>(grid[i]);
      config->block[i] = 1;
    }
    config->grid[0] *= kernel.cluster;
    config->block[0] = image.threads;
    for (std::size_t i = 0; i < launch.block.size(); ++i) {
      const std::int64_t threads = EvaluateInt(launch.block[i], facts_);
      if (threads < 1 || threads > 1024)
        Fail(std::string(kernel.label) + ": its blocks would have " + std::to_string(threads) +
             " threads along a dimension; expected 1 to 1024");
      config->block[i] = static_cast<unsigned>(threads);
    }
    config->shared_bytes = image.shared_bytes;
    config->stream = call_.context->stream;
    config->attributes = attributes;
    const auto add = [config](int id, unsigned x, unsigned y = 0, unsigned z = 0) {
      LaunchAttribute& attribute = config->attributes[config->attribute_count++];
      attribute.id = id;
      attribute.value[0] = x;
      attribute.value[1] = y;
      attribute.value[2] = z;
    };
    if (kernel.dependent) add(kProgrammaticStreamSerialization, 1);
    if (kernel.cooperative) add(kCooperative, 1);
    if (kernel.cluster > 1) {
      add(kClusterDimension, kernel.cluster, 1, 1);
      add(kClusterScheduling, kSpreadClusters);
    }
  }

  const twinop_call& call_;
  const Payload& payload_;
  const Device& device_;
  const Driver& driver_;
  const Facts facts_;
  const Plan& plan_;
  std::int64_t temporaries_[kMaxTemporaries];  // offsets in the scratch memory
  std::int64_t scratch_ = 0;
};

}  // namespace

void RunPlan(const twinop_call& call) {
  Run(call, *static_cast<const State*>(call.state)).Launches();
}

std::int64_t ScratchBytes(const twinop_call& call) {
  return Run(call, *static_cast<const State*>(call.state)).ScratchBytes();
}

const Body& FindBody(const Op& op, const twinop_call& call) {
  const auto combination = static_cast<int>(FindCombination(op, call));
  for (const Body& body : op.bodies)
    if ((body.combination < 0 || body.combination == combination) &&
        (body.for_all_ranks || FitsRanks(body.ranks, call)))
      return body;
  Fail(
      "the library has no function body for inputs of these dtypes and ranks. Build it again with "
      "samples of these");
}

}  // namespace twinop::aot_kernels
