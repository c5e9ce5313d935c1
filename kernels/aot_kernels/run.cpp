// A launch costs the host little: no allocation, lock or text unless it fails.
#include "twinop/aot_kernels/run.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "twinop/math/numeric.h"
#include "twinop/record/trace.h"

namespace twinop::aot_kernels {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kMaxBlocks[] = {INT32_MAX, 65535, 65535};  // of a grid in x, y and z
constexpr std::size_t kMaxParameters = 128 + 2;  // Python refuses more (generate.py)

[[noreturn, gnu::cold]] void Fail(const std::string& message) { throw std::runtime_error(message); }

std::string Text(const Dimensions& grid) {
  return "(" + std::to_string(Narrow(grid.x)) + ", " + std::to_string(Narrow(grid.y)) + ", " +
         std::to_string(Narrow(grid.z)) + ")";
}

// Of a parameter that is an int, by its type.
struct IntType {
  int bits;
  bool is_signed;
};
constexpr IntType kIntTypes[] = {{64, true}, {1, false}, {8, true},   {16, true},  {32, true},
                                 {64, true}, {8, false}, {16, false}, {32, false}, {63, false}};

// Writes a parameter to `place`, which has 8 bytes.
void Store(const Parameter& parameter, const char* label, void* place) {
  const auto store = [place](auto stored) { std::memcpy(place, &stored, sizeof(stored)); };
  const auto single = static_cast<float>(parameter.number);
  Half half;
  switch (parameter.type) {
    case Type::kFp16:
      Round(single, &half);
      return store(half);
    case Type::kBf16:  // cut, as Triton's launcher does
      return store(static_cast<std::uint16_t>(BitsOf(single) >> 16));
    case Type::kFp32:
      return store(single);
    case Type::kFp64:
      return store(parameter.number);
    default:
      break;
  }
  const IntType& type = kIntTypes[static_cast<int>(parameter.type)];
  const std::int64_t excess = parameter.integer >> (type.is_signed ? type.bits - 1 : type.bits);
  if (__builtin_expect(excess != 0 && !(type.is_signed && excess == -1), false))
    Fail(std::string(label) + ": " + parameter.name + " is " + std::to_string(parameter.integer) +
         "; the kernel takes an int of " + std::to_string(type.bits) +
         (type.is_signed ? " bits" : " bits without a sign") +
         ". Call the op with smaller sizes or attributes");
  store(parameter.integer);  // the kernel reads the low bytes, which are the first
}

}  // namespace

bool CallOfPlan::HasDTypes(std::initializer_list<std::int32_t> dtypes) const {
  const twinop_tensor* input = call_.inputs;
  for (const std::int32_t dtype : dtypes) {
    if (input->present != 0 && input->dtype != static_cast<DType>(dtype)) return false;
    ++input;
  }
  return true;
}

bool CallOfPlan::HasRanks(std::initializer_list<int> ranks) const {
  const twinop_tensor* input = call_.inputs;
  for (const int rank : ranks) {
    if (input->present == 0 ? rank >= 0 : static_cast<std::int64_t>(input->rank) != rank)
      return false;
    ++input;
  }
  return true;
}

bool CallOfPlan::TextIs(int index, const char* text) const {
  const twinop_attribute& attribute = call_.attributes[index];
  return std::string_view(attribute.s, attribute.s_size) == text;
}

void CallOfPlan::RefuseRanks(const char* known) {
  Fail(std::string("the launcher was traced for inputs of other ranks:") + known +
       ". Build the library again with samples of these ranks");
}

void CallOfPlan::RefuseSizes() {
  Fail(
      "the launcher was traced for other sizes or attributes. Build the library again with "
      "samples that have these");
}

void CallOfPlan::RefuseBody() {
  Fail(
      "the library has no function body for inputs of these dtypes and ranks. Build it again with "
      "samples of these");
}

PlanRunner::PlanRunner(const twinop_call& call, Mode mode)
    : CallOfPlan(call),
      device_(*static_cast<const State*>(call.state)->device),
      driver_(GetDriver()),
      launches_(mode == Mode::kLaunch) {
  if (launches_) current_.emplace(driver_, device_.context);
}

void PlanRunner::LimitInput(int index, std::int64_t elements, const char* kernel) const {
  CheckLimit(call_.inputs[index], "input ", index, elements, kernel);
}

void PlanRunner::LimitOutput(int index, std::int64_t elements, const char* kernel) const {
  CheckLimit(call_.outputs[index], "output ", index, elements, kernel);
}

void PlanRunner::CheckLimit(const twinop_tensor& tensor, const char* what, int index,
                            std::int64_t elements, const char* kernel) const {
  if (!launches_ || tensor.present == 0 || tensor.numel <= elements) return;
  Fail(std::string(kernel) + ": " + what + std::to_string(index) + " has " +
       std::to_string(tensor.numel) + " elements; the kernel's offsets of 32 bits reach " +
       std::to_string(elements) +
       ". Compute offsets in 64 bits in the kernel: tl.program_id(0).to(tl.int64)");
}

// Adds an aligned block to the scratch memory and returns its offset.
std::int64_t PlanRunner::Reserve(Int bytes) {
  if (bytes < 0)
    Fail("a temporary tensor of the launch has " + std::to_string(Narrow(bytes)) + " bytes");
  const std::int64_t begin = scratch_;
  scratch_ = Narrow((begin + bytes + kAlignment - 1) / kAlignment * kAlignment);
  return begin;
}

Pointer PlanRunner::Temporary(Int bytes) { return At(call_.scratch) + Reserve(bytes); }

void PlanRunner::Fill(Pointer pointer, Int bytes, unsigned char value) const {
  if (!launches_ || bytes <= 0) return;
  Check(driver_.MemsetD8Async(pointer.address, value, static_cast<std::size_t>(bytes),
                              call_.context->stream),
        "filling a tensor");
}

void PlanRunner::Refuse(const char* message) const {
  if (launches_) Fail(message);
}

bool PlanRunner::Begins(const Dimensions& grid, Int scratch_per_program) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return false;
  kernel_scratch_.reset();
  if (scratch_per_program != 0)
    kernel_scratch_ = Reserve(scratch_per_program * grid.x * grid.y * grid.z);
  grid_ = grid;
  return launches_;
}

void PlanRunner::Launch(int kernel, std::initializer_list<Parameter> parameters) const {
  const LoadedKernel& loaded = device_.kernels[kernel];
  if (loaded.function == nullptr) Fail("a kernel is not loaded for these dtypes");
  std::uint64_t storage[kMaxParameters];
  void* places[kMaxParameters];
  std::size_t count = 0;
  for (const Parameter& parameter : parameters) {
    places[count] = &storage[count];
    Store(parameter, loaded.kernel->label, places[count++]);
  }
  // Triton's two: the scratch memory of the kernel, and that of its profiler.
  std::uint64_t trailing[2] = {0, 0};
  if (kernel_scratch_) trailing[0] = (At(call_.scratch) + *kernel_scratch_).address;
  for (unsigned i = 0; i < loaded.kernel->scratch_pointers; ++i) places[count++] = &trailing[i];
  LaunchAttribute attributes[4];
  LaunchConfig config{};
  Configure(loaded, &config, attributes);
  if (__builtin_expect(kIsTraced, false))
    Trace(
        "  %u x %u x %u blocks of %u x %u x %u threads, %u bytes of shared memory: kernel %d, %s, "
        "%.*s",
        config.grid[0], config.grid[1], config.grid[2], config.block[0], config.block[1],
        config.block[2], config.shared_bytes, kernel, loaded.kernel->label,
        static_cast<int>(loaded.image->target.size()), loaded.image->target.data());
  Check(driver_.LaunchKernelEx(&config, loaded.function, places, nullptr), "launching ",
        loaded.kernel->label);
}

void PlanRunner::Configure(const LoadedKernel& loaded, LaunchConfig* config,
                           LaunchAttribute* attributes) const {
  const Kernel& kernel = *loaded.kernel;
  const Int grid[] = {grid_.x, grid_.y, grid_.z};
  for (int i = 0; i < 3; ++i) {
    if (grid[i] < 0 || grid[i] > kMaxBlocks[i] / (i == 0 ? kernel.cluster : 1))
      Fail(std::string(kernel.label) + ": its grid would be " + Text(grid_) +
           "; a GPU launches at most (2147483647, 65535, 65535) blocks. Give each program more "
           "to do, or put the large dimension first");
    config->grid[i] = static_cast<unsigned>(grid[i]);
    config->block[i] = 1;
  }
  config->grid[0] *= kernel.cluster;
  config->block[0] = loaded.image->threads;
  config->shared_bytes = loaded.image->shared_bytes;
  config->stream = call_.context->stream;
  config->attributes = attributes;
  const auto add = [config](int id, unsigned x, unsigned y = 0, unsigned z = 0) {
    LaunchAttribute& attribute = config->attributes[config->attribute_count++];
    attribute.id = id;
    attribute.value[0] = x;
    attribute.value[1] = y;
    attribute.value[2] = z;
  };
  if (kernel.is_dependent) add(kProgrammaticStreamSerialization, 1);
  if (kernel.is_cooperative) add(kCooperative, 1);
  if (kernel.cluster > 1) {
    add(kClusterDimension, kernel.cluster, 1, 1);
    add(kClusterScheduling, kSpreadClusters);
  }
}

}  // namespace twinop::aot_kernels
