#include "twinop/aot_kernels/payload.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace twinop::aot_kernels {
namespace {

void Require(bool holds) {
  if (!holds) throw std::runtime_error("the library's device modules are damaged");
}

// Reads the tables. Their checksum is right, so they are what Python wrote.
class Reader {
 public:
  Reader(const Header& header)
      : payload_(reinterpret_cast<const char*>(&header)),
        at_(payload_ + header.tables_offset),
        end_(at_ + header.tables_size) {}

  Payload Read() {
    Payload payload;
    payload.domain = Text();
    payload.domain_version = Number<std::int32_t>();
    payload.cuda_archs = Text();
    payload.kernels = List([this] { return ReadKernel(); });
    kernels_ = &payload.kernels;
    payload.ops = List([this] { return ReadOp(); });
    Require(at_ == end_);
    return payload;
  }

 private:
  const char* Take(std::size_t bytes) {
    Require(static_cast<std::size_t>(end_ - at_) >= bytes);
    return std::exchange(at_, at_ + bytes);
  }

  // A number or an enumerator.
  template <class T>
  T Number() {
    T value;
    std::memcpy(&value, Take(sizeof(T)), sizeof(T));
    return value;
  }
  std::uint8_t Byte() { return Number<std::uint8_t>(); }

  // A text that ends with a NUL.
  const char* Text(std::uint32_t* size = nullptr) {
    const auto length = Number<std::uint32_t>();
    if (size != nullptr) *size = length;
    return Take(std::size_t{length} + 1);
  }

  // Bytes elsewhere in the payload.
  const char* Bytes(std::size_t* size) {
    const auto offset = Number<std::uint64_t>();
    *size = Number<std::uint64_t>();
    return payload_ + offset;
  }

  template <class ReadOne>
  std::vector<std::invoke_result_t<ReadOne>> List(const ReadOne& read_one) {
    std::vector<std::invoke_result_t<ReadOne>> list;
    for (auto left = Number<std::uint32_t>(); left > 0; --left) list.push_back(read_one());
    return list;
  }

  std::vector<Expression> Expressions() {
    return List([this] { return ReadExpression(); });
  }
  std::vector<std::int8_t> Ranks() {
    return List([this] { return Number<std::int8_t>(); });
  }

  Kernel ReadKernel() {
    Kernel kernel;
    kernel.name = Text();
    kernel.label = Text();
    kernel.images = List([this] {
      Image image;
      image.architecture = Number<std::int32_t>();
      image.is_specific = Byte() != 0;
      image.is_ptx = Byte() != 0;
      image.threads = Number<std::uint32_t>();
      image.shared_bytes = Number<std::uint32_t>();
      image.global_scratch = Number<std::uint64_t>();
      image.data = Bytes(&image.size);
      image.unpacked = Number<std::uint64_t>();
      image.checksum = Number<std::uint32_t>();
      return image;
    });
    kernel.cluster = Number<std::uint32_t>();
    kernel.cooperative = Byte() != 0;
    kernel.dependent = Byte() != 0;
    kernel.scratch_pointers = Byte();
    return kernel;
  }

  Op ReadOp() {
    Op op;
    for (const char*& text : op.texts) text = Text();
    op.combinations = List([this] { return List([this] { return std::int32_t{Byte()}; }); });
    op.plans = List([this] { return ReadPlan(); });
    for (const Plan& plan : op.plans) op.needs_scratch |= NeedsScratch(plan);
    op.bodies = List([this] {
      Body body;
      body.combination = Number<std::int8_t>();
      body.for_all_ranks = Byte() != 0;
      body.ranks = Ranks();
      body.data = Bytes(&body.size);
      return body;
    });
    return op;
  }

  static bool NeedsScratch(const Plan& plan) {
    return !plan.temporaries.empty() ||
           std::any_of(plan.steps.begin(), plan.steps.end(), [](const auto& step) {
             const auto* launch = std::get_if<Launch>(&step);
             return launch != nullptr && launch->scratch_per_program > 0;
           });
  }

  Plan ReadPlan() {
    Plan plan;
    plan.combination = Byte();
    plan.ranks = Ranks();
    plan.guards = Expressions();
    plan.temporaries = Expressions();
    plan.limits = List([this] {
      Limit limit;
      limit.base = Number<Base>();
      limit.index = Byte();
      limit.elements = Number<std::int64_t>();
      return limit;
    });
    plan.steps = List([this]() -> std::variant<Launch, Fill, Refuse> {
      switch (Byte()) {
        case 0:
          return ReadLaunch();
        case 1: {
          Argument pointer = ReadArgument();
          Expression bytes = ReadExpression();
          return Fill{std::move(pointer), std::move(bytes), Byte()};
        }
        default:
          return Refuse{Text()};
      }
    });
    return plan;
  }

  Argument ReadArgument() {
    Argument argument{};
    argument.base = Number<Base>();
    if (argument.base == Base::kScalar)
      argument.name = Text();
    else
      argument.index = Byte();
    argument.value = ReadExpression();
    return argument;
  }

  Launch ReadLaunch() {
    Launch launch;
    for (Expression& size : launch.grid) size = ReadExpression();
    launch.block = Expressions();
    launch.arguments = List([this] { return ReadArgument(); });
    launch.variants = List([this] {
      Variant variant;
      variant.requirements = List([this] {
        const std::uint8_t argument = Byte();
        return Requirement{argument, Number<Requirement::Kind>()};
      });
      variant.parameters = List([this] {
        const std::uint8_t argument = Byte();
        return Parameter{argument, Number<Parameter::Type>()};
      });
      variant.kernel = Number<std::uint32_t>();
      return variant;
    });
    for (const Variant& variant : launch.variants) {
      const Kernel& kernel = kernels_->at(variant.kernel);
      for (const Image& image : kernel.images)
        launch.scratch_per_program =
            std::max(launch.scratch_per_program, image.global_scratch * kernel.cluster);
    }
    return launch;
  }

  Expression ReadExpression() {
    return List([this] {
      Instruction code;
      code.opcode = Number<Opcode>();
      switch (code.opcode) {
        case Opcode::kConstantInt:
          code.integer = Number<std::int64_t>();
          break;
        case Opcode::kConstantFloat:
          code.number = Number<double>();
          break;
        case Opcode::kSize:
          code.index = Byte();
          code.dimension = Byte();
          break;
        case Opcode::kAttribute:
          code.index = Byte();
          code.is_float = Byte() != 0;
          break;
        case Opcode::kTextIs:
          code.index = Byte();
          code.text = Text(&code.text_size);
          break;
        default:
          break;
      }
      return code;
    });
  }

  const char* payload_;
  const char* at_;
  const char* end_;
  const std::vector<Kernel>* kernels_ = nullptr;
};

}  // namespace

std::uint32_t Crc32(const void* data, std::size_t size) {
  static const auto table = [] {
    std::vector<std::uint32_t> entries(256);
    for (std::uint32_t i = 0; i < 256; ++i) {
      entries[i] = i;
      for (int bit = 0; bit < 8; ++bit)
        entries[i] = (entries[i] >> 1) ^ ((entries[i] & 1) != 0 ? 0xEDB88320u : 0u);
    }
    return entries;
  }();
  std::uint32_t crc = ~0u;
  for (std::size_t i = 0; i < size; ++i)
    crc = (crc >> 8) ^ table[(crc ^ static_cast<const unsigned char*>(data)[i]) & 0xFF];
  return ~crc;
}

Payload ReadPayload(const Header& header) {
  const auto* fields = reinterpret_cast<const char*>(&header.size);
  Require(std::memcmp(header.magic, "TWINOPDM", 8) == 0 && header.version == kPayloadVersion &&
          header.checksum == Crc32(fields, sizeof(Header) - offsetof(Header, size)));
  Require(header.tables_offset <= header.size &&
          header.tables_size <= header.size - header.tables_offset);
  Require(header.tables_checksum ==
          Crc32(reinterpret_cast<const char*>(&header) + header.tables_offset, header.tables_size));
  return Reader(header).Read();
}

}  // namespace twinop::aot_kernels
