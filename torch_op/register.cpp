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
#include "twinop/record/table.h"

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
bool IsLoaded(const Record& record, std::string_view space) {
  for (std::size_t i = 0; i < loaded_count; ++i) {
    const Record& other = loaded_ops[i]->record;
    if (other.domain != record.domain || other.schema.name.view() != record.schema.name.view() ||
        loaded_ops[i]->space != space)
      continue;
    if (other.schema.text == record.schema.text) return true;
    throw std::runtime_error("op " + std::string(record.domain) + "::" + record.schema.name.text +
                             " already exists, as " + std::string(other.schema.text));
  }
  return false;
}

// The schema of the twin of an op that writes inputs, which returns their new content instead.
std::string FunctionalSchema(const Schema& schema) {
  std::string text(schema.text.substr(0, schema.text.rfind("->")));
  for (std::size_t i; (i = text.find("Tensor(")) != text.npos;) {
    const std::size_t begin = i + std::string_view("Tensor").size();
    text.erase(begin, text.find(')', begin) + 1 - begin);
  }
  text.insert(text.find(schema.name.view()) + schema.name.size, kFunctional);
  for (std::size_t i = 0; i < schema.output_count; ++i)
    text += (i == 0 ? "-> (Tensor " : ", Tensor ") + std::string(schema.outputs[i].view());
  return text + ")";
}

void RegisterAll(const twinop_table& table, const char* space) {
  std::vector<Record> records;
  for (std::size_t i = 0; i < table.op_count; ++i) {
    Record record = ReadRecord(table, *table.ops[i]);
    if (!IsLoaded(record, space)) records.push_back(record);
  }
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
  const auto define = [&](const Record& record, const std::string& op, const std::string& schema,
                          bool mutates) {
    const std::size_t index = loaded_count;
    loaded_ops[index] = std::make_unique<LoadedOp>(record, mutates, *name);
    definitions->def(schema.c_str());
    // Without a CPU kernel, Python registers what runs or refuses (rules.py).
    if (record.cpu_launch != nullptr) cpu->impl(op.c_str(), BoxedAt<false>(index, kIndices));
    cuda->impl(op.c_str(), BoxedAt<true>(index, kIndices));
    ++loaded_count;
  };
  for (const Record& record : records) {
    const Schema& schema = record.schema;
    const std::string op(schema.name.view());
    define(record, op, std::string(schema.text), schema.WritesInputs());
    if (schema.WritesInputs())
      define(record, op + std::string(kFunctional), FunctionalSchema(schema), false);
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
  } catch (const char* reason) {
    error = std::string("a record does not parse: ") + reason;
  } catch (...) {
    error = "an exception that is not a std::exception";
  }
  return error.c_str();
}
