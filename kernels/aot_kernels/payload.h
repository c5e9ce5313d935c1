// The data that a library carries: its ops, their launch plans and compiled kernels. Python writes
// it (twinop/aot_kernels/encode.py) and documents it (plan.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <variant>
#include <vector>

#include "twinop/aot_kernels/expression.h"

namespace twinop::aot_kernels {

inline constexpr std::uint32_t kPayloadVersion = 1;
// Python refuses more (encode.py).
inline constexpr std::size_t kMaxOps = 64;
inline constexpr std::size_t kMaxLaunchArguments = 128;
inline constexpr std::size_t kMaxTemporaries = 64;

// What the payload begins with, and all of a library that has none yet.
struct Header {
  char magic[8];                // "TWINOPDM"
  std::uint32_t version;        // kPayloadVersion
  std::uint32_t checksum;       // CRC-32 of the fields below
  std::uint64_t size;           // of the payload with this header
  std::uint64_t tables_offset;  // between them lie the records as JSON, for Python
  std::uint64_t tables_size;
  std::uint32_t tables_checksum;
  std::uint32_t payload_checksum;  // of all that follows the header; only Python looks at it
};
static_assert(sizeof(Header) == 48);

std::uint32_t Crc32(const void* data, std::size_t size);

struct Image {
  int architecture;  // 90 for "90" and "90a"
  bool is_specific;  // "90a"
  bool is_ptx;
  unsigned threads, shared_bytes;
  std::uint64_t global_scratch;  // bytes for each block
  const char* data;
  std::size_t size;
  std::size_t unpacked;  // the size of what the LZ4 block in `data` holds; `size`: it is no block
  std::uint32_t checksum;
};

struct Kernel {
  const char* name;
  const char* label;
  std::vector<Image> images;
  unsigned cluster;
  bool cooperative, dependent;  // dependent: PDL
  unsigned scratch_pointers;
};

enum class Base : std::uint8_t { kInput, kOutput, kTemporary, kScalar };

struct Argument {
  Base base;
  std::uint8_t index;  // of the tensor
  const char* name;    // of the scalar
  Expression value;    // of the scalar, or the offset in bytes
};

struct Requirement {
  enum class Kind : std::uint8_t { kDivisibleBy16, kFitsI32 };
  std::uint8_t argument;
  Kind kind;
};

struct Parameter {
  enum class Type : std::uint8_t {
    kPointer,
    kI1,
    kI8,
    kI16,
    kI32,
    kI64,
    kU8,
    kU16,
    kU32,
    kU64,
    kFp16,
    kBf16,
    kFp32,
    kFp64
  };
  std::uint8_t argument;
  Type type;
};

struct Variant {
  std::vector<Requirement> requirements;
  std::vector<Parameter> parameters;
  std::uint32_t kernel;
};

struct Launch {
  Expression grid[3];
  std::vector<Expression> block;  // three, or none: Image::threads
  std::vector<Argument> arguments;
  std::vector<Variant> variants;
  std::uint64_t scratch_per_program = 0;  // the most of all variants and images
};

struct Fill {
  Argument pointer;
  Expression bytes;
  std::uint8_t value;
};

struct Refuse {
  const char* message;
};

struct Limit {
  Base base;
  std::uint8_t index;
  std::int64_t elements;
};

struct Plan {
  std::uint8_t combination;
  std::vector<std::int8_t> ranks;  // of the inputs; -1: absent
  std::vector<Expression> guards;
  std::vector<Expression> temporaries;
  std::vector<Limit> limits;
  std::vector<std::variant<Launch, Fill, Refuse>> steps;
};

struct Body {
  std::int8_t combination;  // -1: all
  bool for_all_ranks;
  std::vector<std::int8_t> ranks;
  const char* data;
  std::size_t size;
};

struct Op {
  const char* texts[10];                                // in the order of twinop_op
  std::vector<std::vector<std::int32_t>> combinations;  // the inputs' dtypes
  std::vector<Plan> plans;
  std::vector<Body> bodies;
  bool needs_scratch = false;
};

struct Payload {
  const char* domain;
  std::int32_t domain_version;
  const char* cuda_archs;
  std::vector<Kernel> kernels;
  std::vector<Op> ops;
};

// Throws std::runtime_error if the payload is damaged, absent or of another version.
Payload ReadPayload(const Header& header);

}  // namespace twinop::aot_kernels
