// Runs a model with custom ops in ONNX Runtime, from C++. Every input is filled with -1, and open
// dimensions are 2.
//
//   run_model net.onnx libmish.so [another library ...]
#include <algorithm>

#include "host.h"

namespace {

void PrintOutput(const char* model, const std::vector<std::string>& libraries) {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "run_model");
  Ort::Session session = Open(env, model, libraries);

  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<std::string> names;
  std::vector<Ort::Value> inputs;
  for (std::size_t i = 0; i < session.GetInputCount(); ++i) {
    names.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    std::vector<std::int64_t> shape =
        session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo().GetShape();
    std::replace_if(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; }, 2);
    inputs.push_back(Ort::Value::CreateTensor<float>(allocator, shape.data(), shape.size()));
    const std::size_t count = inputs.back().GetTensorTypeAndShapeInfo().GetElementCount();
    std::fill_n(inputs.back().GetTensorMutableData<float>(), count, -1.0f);
  }
  std::vector<const char*> input_names;
  for (const std::string& name : names) input_names.push_back(name.c_str());
  const std::string output = session.GetOutputNameAllocated(0, allocator).get();
  const char* output_name = output.c_str();

  const std::vector<Ort::Value> outputs = session.Run(
      Ort::RunOptions(), input_names.data(), inputs.data(), inputs.size(), &output_name, 1);
  const float* values = outputs[0].GetTensorData<float>();
  const std::size_t count = outputs[0].GetTensorTypeAndShapeInfo().GetElementCount();
  for (std::size_t i = 0; i < count; ++i) std::printf("%g\n", values[i]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: run_model MODEL.onnx LIBRARY.so [LIBRARY.so ...]\n");
    return 2;
  }
  return Run("run_model", [&] { PrintOutput(argv[1], {argv + 2, argv + argc}); });
}
