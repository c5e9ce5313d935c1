#include "twinop/device_module/payload.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace twinop::device_module {
namespace {

enum class AttributeKind : std::uint8_t { kInt, kFloat, kText, kList };

void Require(bool holds) {
  if (!holds) throw std::runtime_error("the library's device modules are damaged");
}

// Reads the tables. Whatever their bytes are, it stays inside them.
class Reader {
 public:
  Reader(const Header& header)
      : payload_(reinterpret_cast<const char*>(&header)),
        payload_size_(header.size),
        at_(payload_ + header.tables_offset),
        end_(at_ + header.tables_size) {}

  Payload Read() {
    Payload payload;
    payload.domain = Text();
    payload.domain_version = Number<std::int32_t>();
    payload.cuda_archs = Text();
    payload.kernels = List<Kernel>([this] { return ReadKernel(); });
    kernels_ = &payload.kernels;
    payload.ops = List<Op>([this] { return ReadOp(); });
    Require(at_ == end_ && payload.ops.size() <= kMaxOps);
    return payload;
  }

 private:
  template <class T>
  T Number() {
    T value;
    Require(static_cast<std::size_t>(end_ - at_) >= sizeof(T));
    std::memcpy(&value, at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::uint8_t Byte() { return Number<std::uint8_t>(); }

  // An enumerator or an index, less than `count`.
  template <class T = std::uint8_t>
  T Below(std::size_t count) {
    const std::uint8_t value = Byte();
    Require(value < count);
    return static_cast<T>(value);
  }

  // A text that ends with a NUL.
  const char* Text(std::uint32_t* size = nullptr) {
    const auto length = Number<std::uint32_t>();
    Require(static_cast<std::size_t>(end_ - at_) > length && at_[length] == '\0');
    const char* text = at_;
    at_ += length + 1;
    if (size != nullptr) *size = length;
    return text;
  }

  // Bytes elsewhere in the payload.
  const char* Bytes(std::size_t* size) {
    const auto offset = Number<std::uint64_t>();
    *size = Number<std::uint64_t>();
    Require(offset <= payload_size_ && *size <= payload_size_ - offset);
    return payload_ + offset;
  }

  template <class T, class ReadOne>
  std::vector<T> List(const ReadOne& read_one) {
    const auto count = Number<std::uint32_t>();
    Require(count <= static_cast<std::size_t>(end_ - at_));  // an entry has a byte or more
    std::vector<T> list;
    list.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) list.push_back(read_one());
    return list;
  }

  Kernel ReadKernel() {
    Kernel kernel;
    kernel.name = Text();
    kernel.label = Text();
    kernel.images = List<Image>([this] {
      Image image;
      image.architecture = Number<std::int32_t>();
      image.suffix = static_cast<char>(Byte());
      image.is_ptx = Below(2) != 0;
      image.data = Bytes(&image.size);
      image.checksum = Number<std::uint32_t>();
      return image;
    });
    kernel.threads = Number<std::uint32_t>();
    kernel.shared_bytes = Number<std::uint32_t>();
    kernel.cluster = Number<std::uint32_t>();
    kernel.cooperative = Below(2) != 0;
    kernel.dependent = Below(2) != 0;
    kernel.scratch_pointers = Below(3);
    kernel.global_scratch = Number<std::uint64_t>();
    Require(kernel.cluster >= 1 && kernel.cluster <= 16 && kernel.global_scratch < 1u << 31);
    return kernel;
  }

  Op ReadOp() {
    Op op;
    for (const char*& text : op.texts) text = Text();
    kinds_ = List<AttributeKind>([this] { return Below<AttributeKind>(4); });
    op.combinations = List<std::vector<std::int32_t>>([this] {
      return List<std::int32_t>([this] { return static_cast<std::int32_t>(Byte()); });
    });
    Require(!op.combinations.empty());
    input_count_ = op.combinations[0].size();
    for (const auto& dtypes : op.combinations) Require(dtypes.size() == input_count_);
    output_count_ = Byte();
    op.plans = List<Plan>([this, &op] { return ReadPlan(&op); });
    op.bodies = List<Body>([this] {
      Body body;
      body.combination = Number<std::int8_t>();
      body.for_all_ranks = Below(2) != 0;
      body.ranks = Ranks();
      Require(body.for_all_ranks || body.ranks.size() == input_count_);
      body.data = Bytes(&body.size);
      return body;
    });
    return op;
  }

  std::vector<std::int8_t> Ranks() {
    return List<std::int8_t>([this] { return Number<std::int8_t>(); });
  }

  Plan ReadPlan(Op* op) {
    Plan plan;
    plan.combination = Below(op->combinations.size());
    ranks_ = plan.ranks = Ranks();
    Require(ranks_.size() == input_count_);
    plan.guards = List<Expression>([this] { return ReadExpression(); });
    plan.temporaries = List<Expression>([this] { return ReadExpression(); });
    Require(plan.temporaries.size() <= kMaxTemporaries);
    temporary_count_ = plan.temporaries.size();
    op->needs_scratch |= temporary_count_ > 0;
    plan.limits = List<Limit>([this] {
      Limit limit;
      limit.base = Below<Base>(2);
      limit.index = Below(Count(limit.base));
      limit.elements = Number<std::int64_t>();
      return limit;
    });
    plan.steps = List<std::variant<Launch, Fill, Refuse>>(
        [this, op]() -> std::variant<Launch, Fill, Refuse> {
          switch (Below(3)) {
            case 0: {
              Launch launch = ReadLaunch();
              op->needs_scratch |= launch.scratch_per_program > 0;
              return launch;
            }
            case 1: {
              Argument pointer = ReadArgument();
              Require(pointer.base != Base::kScalar);
              Expression bytes = ReadExpression();
              return Fill{std::move(pointer), std::move(bytes), Byte()};
            }
            default:
              return Refuse{Text()};
          }
        });
    return plan;
  }

  std::size_t Count(Base base) const {
    return base == Base::kInput    ? input_count_
           : base == Base::kOutput ? output_count_
                                   : temporary_count_;
  }

  Argument ReadArgument() {
    Argument argument;
    argument.base = Below<Base>(4);
    argument.index = argument.base == Base::kScalar ? Byte() : Below(Count(argument.base));
    argument.value = ReadExpression();
    return argument;
  }

  Launch ReadLaunch() {
    Launch launch;
    for (Expression& size : launch.grid) size = ReadExpression();
    launch.block = List<Expression>([this] { return ReadExpression(); });
    launch.arguments = List<Argument>([this] { return ReadArgument(); });
    const std::size_t count = launch.arguments.size();
    Require((launch.block.empty() || launch.block.size() == 3) && count <= kMaxLaunchArguments);
    launch.variants = List<Variant>([this, count, &launch] {
      Variant variant;
      variant.requirements = List<Requirement>([this, count] {
        Requirement requirement;
        requirement.argument = Below(count);
        requirement.kind = Below<Requirement::Kind>(3);
        return requirement;
      });
      variant.parameters = List<Parameter>([this, &launch] {
        Parameter parameter;
        parameter.argument = Below(launch.arguments.size());
        parameter.type = Below<Parameter::Type>(14);
        const bool is_pointer = launch.arguments[parameter.argument].base != Base::kScalar;
        Require(is_pointer == (parameter.type == Parameter::Type::kPointer));
        return parameter;
      });
      variant.kernel = Number<std::uint32_t>();
      Require(variant.kernel < kernels_->size() &&
              variant.parameters.size() <= kMaxLaunchArguments);
      const Kernel& kernel = (*kernels_)[variant.kernel];
      launch.scratch_per_program =
          std::max(launch.scratch_per_program, kernel.global_scratch * kernel.cluster);
      return variant;
    });
    Require(!launch.variants.empty() && launch.variants.back().requirements.empty());
    return launch;
  }

  Expression ReadExpression() {
    int depth = 0;
    Expression expression = List<Instruction>([this, &depth] {
      Instruction code;
      code.opcode = Below<Opcode>(static_cast<std::size_t>(kLastOpcode) + 1);
      depth += 1 - OperandCount(code.opcode);
      Require(depth >= 1 && depth <= kMaxDepth);
      switch (code.opcode) {
        case Opcode::kConstantInt:
          code.integer = Number<std::int64_t>();
          break;
        case Opcode::kConstantFloat:
          code.number = Number<double>();
          break;
        case Opcode::kSize:
          code.index = Below(input_count_);
          code.dimension = Byte();
          Require(code.dimension < ranks_[code.index]);
          break;
        case Opcode::kAttribute:
          code.index = Below(kinds_.size());
          code.is_float = kinds_[code.index] == AttributeKind::kFloat;
          Require(code.is_float || kinds_[code.index] == AttributeKind::kInt);
          break;
        case Opcode::kTextIs:
          code.index = Below(kinds_.size());
          code.text = Text(&code.text_size);
          Require(kinds_[code.index] == AttributeKind::kText);
          break;
        default:
          break;
      }
      return code;
    });
    Require(depth == 1);
    return expression;
  }

  const char* payload_;
  std::size_t payload_size_;
  const char* at_;
  const char* end_;
  const std::vector<Kernel>* kernels_ = nullptr;
  // Of the op and the plan that are being read.
  std::vector<AttributeKind> kinds_;
  std::vector<std::int8_t> ranks_;
  std::size_t input_count_ = 0, output_count_ = 0, temporary_count_ = 0;
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

}  // namespace twinop::device_module
