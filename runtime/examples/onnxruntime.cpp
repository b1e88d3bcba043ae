/* onnxruntime.cpp: a program that has onnxruntime, with coda-edge's kernels in it.
 *
 *   c++ -std=c++17 onnxruntime.cpp -I<onnxruntime's headers> -lonnxruntime -o onnxruntime
 *   ./onnxruntime MODEL.onnx [LIBRARY.so [BUNDLE.coda]]
 *
 * MODEL.onnx is what `coda-edge package --form ort-bundle` (or `--form ort`) wrote, LIBRARY.so the generic library (or
 * the model's own). Without it the model runs as well, by onnxruntime's kernels: one line makes the difference. With
 * BUNDLE.coda, MODEL.onnx is the untouched model, and the generic library's execution provider runs it.
 *
 * Every input is filled with ones, every dynamic dimension is 8; prints each output's shape and the sum of its
 * elements. */
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

static Ort::Value ones(const Ort::ConstTensorTypeAndShapeInfo &type, OrtAllocator *allocator) {
  std::vector<int64_t> shape = type.GetShape();
  for (int64_t &dim : shape)
    dim = dim < 0 ? 8 : dim;
  Ort::Value value = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type.GetElementType());
  const size_t count = value.GetTensorTypeAndShapeInfo().GetElementCount();
  switch (type.GetElementType()) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: std::fill_n(value.GetTensorMutableData<float>(), count, 1.0f); break;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: std::fill_n(value.GetTensorMutableData<int64_t>(), count, 1); break;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: std::fill_n(value.GetTensorMutableData<int32_t>(), count, 1); break;
  default: throw std::runtime_error("this example feeds float, int32 and int64 only");
  }
  return value;
}

/* The model's nodes go to the bundle (onnxruntime 1.24 and later). */
static void add_provider(Ort::Env &env, Ort::SessionOptions &options, const char *library, const char *bundle) {
  env.RegisterExecutionProviderLibrary("CodaEP", library);
  std::vector<Ort::ConstEpDevice> devices;
  for (const Ort::ConstEpDevice &device : env.GetEpDevices())
    if (std::string(device.EpName()) == "CodaEP")
      devices = {device};
  options.AppendExecutionProvider_V2(env, devices, std::unordered_map<std::string, std::string>{{"bundle", bundle}});
}

static void print(const char *name, const Ort::Value &value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  std::cout << name;
  for (const int64_t dim : info.GetShape())
    std::cout << " " << dim;
  if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
    const float *data = value.GetTensorData<float>();
    std::cout << ": " << std::accumulate(data, data + info.GetElementCount(), 0.0);
  }
  std::cout << "\n";
}

int main(int count, char **arguments) try {
  if (count < 2) {
    std::cerr << "usage: " << arguments[0] << " MODEL.onnx [LIBRARY.so [BUNDLE.coda]]\n";
    return 2;
  }
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "example");
  Ort::SessionOptions options;
  if (count > 3)
    add_provider(env, options, arguments[2], arguments[3]);
  else if (count > 2)
    options.RegisterCustomOpsLibrary(arguments[2]);
  Ort::Session session(env, arguments[1], options);

  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<Ort::AllocatedStringPtr> owned;
  std::vector<const char *> inputs, outputs;
  std::vector<Ort::Value> values;
  for (size_t i = 0; i < session.GetInputCount(); i++) {
    inputs.push_back(owned.emplace_back(session.GetInputNameAllocated(i, allocator)).get());
    values.push_back(ones(session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo(), allocator));
  }
  for (size_t i = 0; i < session.GetOutputCount(); i++)
    outputs.push_back(owned.emplace_back(session.GetOutputNameAllocated(i, allocator)).get());

  const std::vector<Ort::Value> results = session.Run(Ort::RunOptions{nullptr}, inputs.data(), values.data(),
                                                      values.size(), outputs.data(), outputs.size());
  for (size_t i = 0; i < results.size(); i++)
    print(outputs[i], results[i]);
  return 0;
} catch (const std::exception &error) {
  std::cerr << error.what() << "\n";
  return 1;
}
