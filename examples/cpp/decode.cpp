// Continues a prompt by 64 tokens with a decoder that `twinop optimize` wrote, greedily.
//
//   decode model.onnx libcustom_ops.so cpu|cuda ROWS TOKEN [TOKEN ...]
//
// ROWS is how many tokens a cache has room for: past and present are one memory, as files of
// onnxruntime-genai want it. With 0, present is a larger tensor, which becomes past, as exported
// models want it. Caches stay on the device; tokens and masks go there, logits come back.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "host.h"

namespace {

constexpr std::int64_t kNewTokens = 64;

struct Cache {
  std::string past, present;  // names of an input and an output
  Ort::Value memory;
};

class Decoder {
 public:
  Decoder(const char* model, const char* library, bool cuda, std::int64_t rows)
      : rows_(rows),
        session_(Open(env_, model, {library}, cuda)),
        device_(cuda ? "Cuda" : "Cpu", OrtDeviceAllocator, 0, OrtMemTypeDefault),
        allocator_(session_, device_),
        binding_(session_) {
    std::vector<std::string> presents;
    for (std::size_t i = 0; i < session_.GetOutputCount(); ++i) {
      const std::size_t rank =
          session_.GetOutputTypeInfo(i).GetTensorTypeAndShapeInfo().GetDimensionsCount();
      const std::string name = session_.GetOutputNameAllocated(i, host_).get();
      if (rank == 4) presents.push_back(name);
      if (rank == 3) logits_ = name;
    }
    for (std::size_t i = 0; i < session_.GetInputCount(); ++i)
      AddInput(session_.GetInputNameAllocated(i, host_).get(), session_.GetInputTypeInfo(i));
    if (logits_.empty() || caches_.empty() || presents.size() != caches_.size())
      throw std::runtime_error("the model has " + std::to_string(caches_.size()) +
                               " caches as inputs and " + std::to_string(presents.size()) +
                               " as outputs; expected as many of both, and logits [1, S, V]");
    for (std::size_t i = 0; i < caches_.size(); ++i) caches_[i].present = presents[i];
  }

  // Reads new tokens, and returns the one that follows them.
  std::int64_t Next(std::vector<std::int64_t> tokens) {
    std::vector<std::int64_t> positions(tokens.size()), mask(done_ + tokens.size(), 1);
    std::iota(positions.begin(), positions.end(), done_);
    done_ += static_cast<std::int64_t>(tokens.size());
    for (const std::string& name : numbers_)
      Bind(name, name == "input_ids" ? tokens : name == "position_ids" ? positions : mask);
    // Where only the device is bound, each run needs it again: the tensor that the last one made
    // stays.
    binding_.BindOutput(logits_.c_str(), host_info_);
    for (const Cache& cache : caches_) {
      binding_.BindInput(cache.past.c_str(), cache.memory);
      if (rows_ > 0) binding_.BindOutput(cache.present.c_str(), cache.memory);
      if (rows_ == 0) binding_.BindOutput(cache.present.c_str(), device_);
    }
    session_.Run(Ort::RunOptions(), binding_);
    std::vector<Ort::Value> outputs = binding_.GetOutputValues();  // in the order of BindOutput
    for (std::size_t i = 0; i < caches_.size(); ++i) caches_[i].memory = std::move(outputs[i + 1]);
    switch (outputs[0].GetTensorTypeAndShapeInfo().GetElementType()) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
        return Best<float>(outputs[0]);
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
        return Best<Ort::Float16_t>(outputs[0]);
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
        return Best<Ort::BFloat16_t>(outputs[0]);
      default:
        throw std::runtime_error(logits_ + ": expected float, float16 or bfloat16");
    }
  }

 private:
  void AddInput(const std::string& name, const Ort::TypeInfo& info) {
    const auto type = info.GetTensorTypeAndShapeInfo();
    std::vector<std::int64_t> shape = type.GetShape();
    if (name == "input_ids" || name == "position_ids" || name == "attention_mask") {
      numbers_.push_back(name);
    } else if (shape.size() == 4 && shape[1] > 0 && shape[3] > 0) {
      shape = {1, shape[1], rows_, shape[3]};
      caches_.push_back({name, "",
                         Ort::Value::CreateTensor(allocator_, shape.data(), shape.size(),
                                                  type.GetElementType())});
    } else {
      throw std::runtime_error("input " + name + ": expected input_ids, position_ids, " +
                               "attention_mask and caches [B, heads, S, size of a head]");
    }
  }

  // Lets an input of the next run be numbers [1, S], which live until then.
  void Bind(const std::string& name, std::vector<std::int64_t>& numbers) {
    const std::int64_t shape[] = {1, static_cast<std::int64_t>(numbers.size())};
    binding_.BindInput(name.c_str(), Ort::Value::CreateTensor<std::int64_t>(
                                         host_info_, numbers.data(), numbers.size(), shape, 2));
  }

  // Returns the index of the largest of the logits after the last token.
  template <class T>
  static std::int64_t Best(const Ort::Value& logits) {
    const auto info = logits.GetTensorTypeAndShapeInfo();
    const std::int64_t size = info.GetShape().back();
    const T* last = logits.GetTensorData<T>() + info.GetElementCount() - size;
    return std::max_element(last, last + size, [](T a, T b) { return float(a) < float(b); }) - last;
  }

  const std::int64_t rows_;
  std::int64_t done_ = 0;
  Ort::Env env_{ORT_LOGGING_LEVEL_WARNING, "decode"};
  Ort::Session session_;
  Ort::MemoryInfo device_;
  Ort::Allocator allocator_;
  Ort::AllocatorWithDefaultOptions host_;
  Ort::MemoryInfo host_info_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
  std::vector<Cache> caches_;
  std::vector<std::string> numbers_;
  std::string logits_;
  Ort::IoBinding binding_;
};

std::int64_t Number(const char* text) {
  char* end = nullptr;
  const long long number = std::strtoll(text, &end, 10);
  if (end == text || *end != 0 || number < 0)
    throw std::runtime_error("ROWS and tokens are numbers from 0 on, not " + std::string(text));
  return number;
}

void Decode(int argc, char** argv) {
  const std::string device = argv[3];
  if (device != "cpu" && device != "cuda")
    throw std::runtime_error("the device is cpu or cuda, not " + device);
  std::vector<std::int64_t> tokens(argc - 5);
  std::transform(argv + 5, argv + argc, tokens.begin(), Number);
  const std::int64_t rows = Number(argv[4]), needed = argc - 5 + kNewTokens - 1;
  if (rows > 0 && rows < needed)  // nothing reads the last token
    throw std::runtime_error("a prompt of " + std::to_string(argc - 5) + " and " +
                             std::to_string(kNewTokens) + " new tokens take " +
                             std::to_string(needed) + " rows of the caches, which have " + argv[4] +
                             ". Give ROWS >= " + std::to_string(needed));
  Decoder decoder(argv[1], argv[2], device == "cuda", rows);
  for (std::int64_t i = 0; i < kNewTokens; ++i) {
    tokens = {decoder.Next(tokens)};
    std::printf("%lld\n", static_cast<long long>(tokens[0]));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(stderr, "usage: decode MODEL.onnx LIBRARY.so cpu|cuda ROWS TOKEN [TOKEN ...]\n");
    return 2;
  }
  return Run("decode", [&] { Decode(argc, argv); });
}
