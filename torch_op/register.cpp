// Registers this library's records with torch. Not a static initializer: a second TORCH_LIBRARY of
// the domain, or an op defined twice, ends the process; Python checks first and gets errors back as
// text.
#include <memory>
#include <string>
#include <utility>

#include "kernels/registry.h"
#include "torch_op/call.h"

namespace twinop::torch_op {
namespace {

using torch::stable::detail::StableLibrary;

// The dispatcher passes no context to a boxed function, so the record's place in the registry is
// part of the function's type.
template <std::size_t kIndex, bool kCuda>
void Boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  CallBoxed(*Registry().begin()[kIndex], kCuda, stack);
}

using BoxedFunction = void (*)(StableIValue*, std::uint64_t, std::uint64_t);
constexpr std::size_t kMaxRecords = 128;

template <bool kCuda, std::size_t... kIndices>
BoxedFunction BoxedAt(std::size_t index, std::index_sequence<kIndices...>) {
  static constexpr BoxedFunction kTable[] = {Boxed<kIndices, kCuda>...};
  return kTable[index];
}

StableLibrary* MakeLibrary(StableLibrary::Kind kind, const char* key) {
  // Never deleted: deleting it would take the registrations back.
  return new StableLibrary(kind, kDomain, key, __FILE__, __LINE__);
}

void RegisterAll() {
  Registry records;
  if (records.size() > kMaxRecords)
    throw std::runtime_error("a torch library holds at most " + std::to_string(kMaxRecords) +
                             " ops; split it");
  constexpr auto kIndices = std::make_index_sequence<kMaxRecords>{};
  StableLibrary* definitions = MakeLibrary(StableLibrary::Kind::FRAGMENT, "");
  StableLibrary* cpu = MakeLibrary(StableLibrary::Kind::IMPL, "CPU");
  StableLibrary* cuda = MakeLibrary(StableLibrary::Kind::IMPL, "CUDA");
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Schema& schema = records.begin()[i]->schema;
    definitions->def(std::string(schema.text).c_str());
    cpu->impl(schema.name.text, BoxedAt<false>(i, kIndices));
    cuda->impl(schema.name.text, BoxedAt<true>(i, kIndices));
  }
}

}  // namespace
}  // namespace twinop::torch_op

// Returns null, or what went wrong (valid until the next call).
extern "C" __attribute__((visibility("default"))) const char* twinop_register_torch_ops() {
  static std::string error;
  try {
    twinop::torch_op::RegisterAll();
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  return error.c_str();
}
