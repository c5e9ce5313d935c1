// One run of an op's plan: the function that a generated source has for the op is called with it,
// once to find out how much scratch memory the call needs and once to launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "twinop/aot_kernels/driver.h"
#include "twinop/aot_kernels/kernels.h"
#include "twinop/aot_kernels/number.h"

namespace twinop::aot_kernels {

// An address on the device; null stays null.
struct Pointer {
  std::uint64_t address = 0;

  Pointer operator+(Int bytes) const {
    return {address == 0 ? 0 : address + static_cast<std::uint64_t>(Narrow(bytes))};
  }
};

// What Triton specialises kernels for.
inline bool DivisibleBy16(Pointer pointer) { return pointer.address % 16 == 0; }
inline bool DivisibleBy16(Int number) { return number % 16 == 0; }
inline bool FitsI32(Int number) { return number == static_cast<std::int32_t>(number); }

// An argument of a kernel in the type of its parameter.
struct Parameter {
  enum class Type {
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

  Type type;
  const char* name;  // for messages
  std::int64_t integer = 0;
  double number = 0;

  Parameter(Pointer pointer)
      : type(Type::kPointer), name(""), integer(static_cast<std::int64_t>(pointer.address)) {}
  Parameter(Type type, const char* name, Int value)
      : type(type), name(name), integer(Narrow(value)), number(static_cast<double>(value)) {}
  Parameter(Type type, const char* name, double value) : type(type), name(name), number(value) {}
};
using Type = Parameter::Type;

struct Dimensions {
  Int x, y, z;
};

// A call whose plan is looked for.
class CallOfPlan {
 public:
  explicit CallOfPlan(const twinop_call& call) : call_(call) {}

  // Whether the inputs that are present have these dtypes.
  bool HasDTypes(std::initializer_list<std::int32_t> dtypes) const;
  // Whether the inputs have these ranks; -1: absent.
  bool HasRanks(std::initializer_list<int> ranks) const;

  Int Size(int input, int dimension) const { return call_.inputs[input].sizes[dimension]; }
  Int IntAttribute(int index) const { return call_.attributes[index].i; }
  double FloatAttribute(int index) const { return call_.attributes[index].f; }
  bool TextIs(int index, const char* text) const;

  // `known`: the ranks that the plans are for, " (1) (2)".
  [[noreturn]] static void RefuseRanks(const char* known);
  [[noreturn]] static void RefuseSizes();
  [[noreturn]] static void RefuseBody();

 protected:
  const twinop_call& call_;
};

class PlanRunner : public CallOfPlan {
 public:
  enum class Mode { kScratch, kLaunch };

  PlanRunner(const twinop_call& call, Mode mode);

  Int Arch() const { return device_.architecture; }
  Pointer Input(int index) const { return At(call_.inputs[index].data); }
  Pointer Output(int index) const { return At(call_.outputs[index].data); }
  // The sizes that come from the data.
  Pointer Counts(int) const { return At(call_.counts); }

  // The elements that an input or output may have; `kernel`: the one whose offsets have 32 bits.
  void LimitInput(int index, std::int64_t elements, const char* kernel) const;
  void LimitOutput(int index, std::int64_t elements, const char* kernel) const;

  // A part of the scratch memory.
  Pointer Temporary(Int bytes);

  void Fill(Pointer pointer, Int bytes, unsigned char value) const;

  // Ends the call with a message: what the launcher raised for these sizes.
  void Refuse(const char* message) const;

  // Whether a kernel is to be launched with this grid. Then Launch follows.
  bool Begins(const Dimensions& grid, Int scratch_per_program = 0);

  void Launch(int kernel, std::initializer_list<Parameter> parameters) const;

  std::int64_t scratch() const { return scratch_; }

 private:
  static Pointer At(const void* data) { return {reinterpret_cast<std::uintptr_t>(data)}; }
  void CheckLimit(const twinop_tensor& tensor, const char* what, int index, std::int64_t elements,
                  const char* kernel) const;
  std::int64_t Reserve(Int bytes);
  void Configure(const LoadedKernel& loaded, LaunchConfig* config,
                 LaunchAttribute* attributes) const;

  const Device& device_;
  const Driver& driver_;
  const bool launches_;
  std::optional<CurrentContext> current_;
  std::int64_t scratch_ = 0;
  Dimensions grid_;
  std::optional<std::int64_t> kernel_scratch_;  // the offset of the current launch's own
};

}  // namespace twinop::aot_kernels
