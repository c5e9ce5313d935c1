// Registers the ops of a library with torch. Python calls a function for it and gets errors as
// text. A static initializer would end the process on a second TORCH_LIBRARY of one namespace or an
// op that is defined twice.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "torch_op/call.h"
#include "twinop/record/check.h"

namespace twinop::torch_op {
namespace {

using torch::stable::detail::StableLibrary;

// The ops of all libraries in the process. The dispatcher passes no context to a boxed function, so
// each place in this table has a function of its own.
constexpr std::size_t kMaxOps = 512;
std::unique_ptr<LoadedOp> loaded_ops[kMaxOps];
std::size_t loaded_count = 0;

template <std::size_t kIndex, bool kCuda>
void Boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  try {
    CallBoxed(loaded_ops[kIndex].get(), kCuda, stack);
  } catch (const std::exception&) {
    throw;
  } catch (const char* reason) {
    throw std::runtime_error(reason);
  } catch (...) {
    throw std::runtime_error("an exception that is not a std::exception");
  }
}

using BoxedFunction = void (*)(StableIValue*, std::uint64_t, std::uint64_t);

template <bool kCuda, std::size_t... kIndices>
BoxedFunction BoxedAt(std::size_t index, std::index_sequence<kIndices...>) {
  static constexpr BoxedFunction kTable[] = {Boxed<kIndices, kCuda>...};
  return kTable[index];
}

// `schemas` has lines: the name and the schema of each op, and those of the functional twin of one
// that writes inputs.
void RegisterAll(const twinop_table& table, const char* space, std::string_view schemas) {
  const auto count = static_cast<std::size_t>(std::count(schemas.begin(), schemas.end(), '\n'));
  if (loaded_count + count > kMaxOps)
    throw std::runtime_error("a process holds at most " + std::to_string(kMaxOps) +
                             " ops of twinop's libraries");
  // Never deleted, because their destructors would take the registrations back. torch keeps no copy
  // of the namespace.
  const auto* name = new std::string(space);
  const auto make = [name](StableLibrary::Kind kind, const char* key) {
    return new StableLibrary(kind, name->c_str(), key, __FILE__, __LINE__);
  };
  constexpr auto kIndices = std::make_index_sequence<kMaxOps>{};
  StableLibrary* definitions = make(StableLibrary::Kind::FRAGMENT, "");
  StableLibrary* cpu = make(StableLibrary::Kind::IMPL, "CPU");
  StableLibrary* cuda = make(StableLibrary::Kind::IMPL, "CUDA");
  for (; !schemas.empty(); schemas.remove_prefix(schemas.find('\n') + 1)) {
    const std::string line(schemas.substr(0, schemas.find('\n')));
    const std::string op = line.substr(0, line.find(' ')), schema = line.substr(op.size());
    for (std::size_t i = 0; i < table.op_count; ++i) {
      const OpSpec& record = FromC(*table.ops[i]);
      const bool is_twin =
          op == std::string(record.name) + "_functional";  // OpSpec.functional_name
      if (op != record.name && !(is_twin && record.WritesInputs())) continue;
      const std::size_t index = loaded_count++;
      loaded_ops[index] =
          std::make_unique<LoadedOp>(record, !is_twin && record.WritesInputs(), *name);
      definitions->def(schema.c_str());
      // Without a CPU kernel, Python registers what runs or refuses (rules.py).
      if (record.cpu != nullptr) cpu->impl(op.c_str(), BoxedAt<false>(index, kIndices));
      cuda->impl(op.c_str(), BoxedAt<true>(index, kIndices));
    }
  }
}

}  // namespace
}  // namespace twinop::torch_op

// Registers ops of a library, given its function twinop_library, in a namespace of torch. Returns
// null, or an error that is valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* twinop_torch_register(
    twinop_library_function library, const char* space, const char* schemas) {
  static std::mutex mutex;
  static std::string error;
  const std::lock_guard<std::mutex> lock(mutex);
  try {
    const twinop_table* table = library(TWINOP_ABI_VERSION);
    const twinop::Status status = twinop::CheckTable(table, "libtwinop_torch.so");
    if (!status.ok()) throw std::runtime_error(status.message());
    twinop::torch_op::RegisterAll(*table, space, schemas);
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
  } catch (...) {
    error = "an exception that is not a std::exception";
  }
  return error.c_str();
}
