// twinop_library() of a library whose payload describes ops: those, and the ops linked into it.
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "twinop/aot_kernels/launch.h"
#include "twinop/record/record.h"

extern "C" {
// Bounds of the linked ops' entries; null where there are none.
[[gnu::visibility("hidden"), gnu::weak]] extern const twinop_op* const __start_twinop_ops[];
[[gnu::visibility("hidden"), gnu::weak]] extern const twinop_op* const __stop_twinop_ops[];
}

namespace twinop::aot_kernels {
namespace {

// The linker gives this section a segment of its own, the last one (cmake/TwinopFlags.cmake).
// twinop/aot_kernels/pack.py replaces it with a payload, which is longer.
[[gnu::section(".twinop_modules"), gnu::used, gnu::aligned(16)]] const Header kPlace = {
    {'T', 'W', 'I', 'N', 'O', 'P', 'D', 'M'}, 0, 0, 0, 0, 0, 0, 0};

// The ops and their functions. The functions have no argument for the op, so that each of a
// payload's ops has `create` and `body` of its own.
struct Library {
  Payload payload;
  twinop_op entries[kMaxOps] = {};
  std::vector<const twinop_op*> ops;
  twinop_table table;
};

const Library* OpenedLibrary();

template <std::size_t kOp>
std::int32_t Create(const twinop_call* call, void** state, twinop_error* error) {
  return AtBoundary(error, [=] {
    const Payload& payload = OpenedLibrary()->payload;
    const Op& op = payload.ops[kOp];
    *state = new State{&payload, &op, &LoadKernels(payload, op, *call)};
    return Status();
  });
}

template <std::size_t kOp>
std::int32_t GiveBody(const twinop_call* call, const void** model, std::size_t* size,
                      twinop_error* error) {
  return AtBoundary(error, [=] {
    const Body& body = FindBody(OpenedLibrary()->payload.ops[kOp], *call);
    *model = body.data;
    *size = body.size;
    return Status();
  });
}

struct Functions {
  decltype(twinop_op::create) create;
  decltype(twinop_op::body) body;
};

template <std::size_t... kOps>
constexpr std::array<Functions, sizeof...(kOps)> FunctionsOf(std::index_sequence<kOps...>) {
  return {Functions{Create<kOps>, GiveBody<kOps>}...};
}
constexpr auto kFunctions = FunctionsOf(std::make_index_sequence<kMaxOps>());

std::int32_t LaunchOnCuda(const twinop_call* call, twinop_error* error) {
  return AtBoundary(error, [call] {
    RunPlan(*call);
    return Status();
  });
}

std::int32_t GiveScratchBytes(const twinop_call* call, std::int64_t* bytes, twinop_error* error) {
  return AtBoundary(error, [=] {
    *bytes = ScratchBytes(*call);
    return Status();
  });
}

twinop_op EntryOf(const Op& op, const Functions& functions) {
  twinop_op entry = {};
  entry.struct_size = sizeof(entry);
  static_assert(offsetof(twinop_op, cpu) - offsetof(twinop_op, schema) == sizeof(op.texts));
  std::memcpy(&entry.schema, op.texts, sizeof(op.texts));
  if (!op.plans.empty()) {
    entry.cuda = LaunchOnCuda;
    entry.create = functions.create;
    entry.destroy = [](void* state) { delete static_cast<State*>(state); };
    if (op.needs_scratch) entry.scratch_size = GiveScratchBytes;
  }
  if (!op.bodies.empty()) entry.body = functions.body;
  return entry;
}

// Null if the payload is absent or damaged: the adapters then say that there is no table of ops.
std::unique_ptr<const Library> Open() try {
  const Header* header = &kPlace;
  asm volatile("" : "+r"(header));  // the compiler knows other contents
  auto library = std::make_unique<Library>();
  library->payload = ReadPayload(*header);
  library->ops.assign(__start_twinop_ops, __stop_twinop_ops);
  for (std::size_t i = 0; i < library->payload.ops.size(); ++i) {
    library->entries[i] = EntryOf(library->payload.ops[i], kFunctions[i]);
    library->ops.push_back(&library->entries[i]);
  }
  library->table = {TWINOP_ABI_VERSION,
                    sizeof(twinop_table),
                    TWINOP_VERSION,
                    library->payload.domain,
                    library->payload.domain_version,
                    library->payload.cuda_archs,
                    library->ops.size(),
                    library->ops.data()};
  return library;
} catch (...) {
  return nullptr;
}

const Library* OpenedLibrary() {
  static const Library* const library = Open().release();  // never deleted: sessions use it
  return library;
}

}  // namespace
}  // namespace twinop::aot_kernels

extern "C" const twinop_table* twinop_library(std::uint32_t) {
  const auto* library = twinop::aot_kernels::OpenedLibrary();
  return library == nullptr ? nullptr : &library->table;
}
