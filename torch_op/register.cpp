// Registers the ops of a library with torch. Python calls a function for it and gets errors as
// text. A static initializer would end the process on a second TORCH_LIBRARY of one namespace or an
// op that is defined twice.
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

constexpr std::string_view kFunctional = "_functional";  // OpSpec.functional_name

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

// Whether an op is loaded. Throws if its name is, with another schema.
bool IsLoaded(const OpSpec& record, std::string_view space) {
  for (std::size_t i = 0; i < loaded_count; ++i) {
    const OpSpec& other = loaded_ops[i]->record;
    if (std::string_view(other.domain) != record.domain ||
        std::string_view(other.name) != record.name || loaded_ops[i]->space != space)
      continue;
    if (std::string_view(other.schema) == record.schema) return true;
    throw std::runtime_error(std::string("op ") + record.domain + "::" + record.name +
                             " already exists, as " + other.schema);
  }
  return false;
}

// The schema of the twin of an op that writes inputs, which returns their new content instead.
std::string FunctionalSchema(const OpSpec& record) {
  std::string text = record.name + std::string(kFunctional);
  for (std::size_t i = 0; i < record.input_count + record.attribute_count; ++i) {
    const Argument& argument = record.arguments[i];
    text += (i == 0 ? "(" : ", ") + std::string(KindName(argument.kind)) + " " + argument.name;
    const std::string_view value = View(argument.default_text);
    const bool has_quote = value.find('"') != value.npos;
    const char* const quote = argument.kind != Kind::kString ? "" : has_quote ? "'" : "\"";
    if (argument.has_default) text += "=" + (quote + std::string(value)) + quote;
  }
  for (std::size_t i = 0; i < record.output_count; ++i)
    text += (i == 0 ? ") -> (Tensor " : ", Tensor ") + std::string(record.outputs[i].name);
  return text + ")";
}

void RegisterAll(const twinop_table& table, const char* space) {
  std::vector<const OpSpec*> records;
  for (std::size_t i = 0; i < table.op_count; ++i)
    if (const OpSpec& record = FromC(*table.ops[i]); !IsLoaded(record, space))
      records.push_back(&record);
  if (records.empty()) return;
  if (loaded_count + 2 * records.size() > kMaxOps)
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
  const auto define = [&](const OpSpec& record, const std::string& op, const std::string& text,
                          bool mutates) {
    const std::size_t index = loaded_count;
    loaded_ops[index] = std::make_unique<LoadedOp>(record, mutates, *name);
    definitions->def(text.c_str());
    // Without a CPU kernel, Python registers what runs or refuses (rules.py).
    if (record.cpu != nullptr) cpu->impl(op.c_str(), BoxedAt<false>(index, kIndices));
    cuda->impl(op.c_str(), BoxedAt<true>(index, kIndices));
    ++loaded_count;
  };
  for (const OpSpec* record : records) {
    define(*record, record->name, record->schema, record->WritesInputs());
    if (record->WritesInputs())
      define(*record, record->name + std::string(kFunctional), FunctionalSchema(*record), false);
  }
}

}  // namespace
}  // namespace twinop::torch_op

// Registers the ops of a library, given its function twinop_library, in a namespace of torch.
// Returns null, or an error that is valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* twinop_torch_register(
    twinop_library_function library, const char* space) {
  static std::mutex mutex;
  static std::string error;
  const std::lock_guard<std::mutex> lock(mutex);
  try {
    const twinop_table* table = library(TWINOP_ABI_VERSION);
    const twinop::Status status = twinop::CheckTable(table, "libtwinop_torch.so");
    if (!status.ok()) throw std::runtime_error(status.message());
    twinop::torch_op::RegisterAll(*table, space);
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
  } catch (...) {
    error = "an exception that is not a std::exception";
  }
  return error.c_str();
}
