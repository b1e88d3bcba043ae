// coda.hpp: coda.h for C++17, in this header alone. Objects give back what they hold; failures are exceptions.
//
//   coda::Model model("model.coda");
//   coda::Session session(model);
//   const std::vector<std::int64_t> ids = {101, 7592, 102};
//   std::vector<coda::Tensor> outputs = session.run({coda::tensor(ids.data(), {1, 3})});
//   const float *hidden = outputs[0].as<float>();
#ifndef CODA_HPP
#define CODA_HPP

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "coda.h"

namespace coda {

// What a call of the runtime failed with.
class Error : public std::runtime_error {
public:
  explicit Error(const coda_error &error) : std::runtime_error(error.message), code_(error.code) {}
  coda_code code() const noexcept { return code_; }

private:
  coda_code code_;
};

namespace detail {
template <typename Call> void check(Call call) {
  coda_error error;
  if (call(&error) != CODA_OK)
    throw Error(error);
}

template <typename T> struct dtype;
template <> struct dtype<float> {
  static constexpr coda_dtype value = CODA_FLOAT32;
};
template <> struct dtype<double> {
  static constexpr coda_dtype value = CODA_FLOAT64;
};
template <> struct dtype<std::uint8_t> {
  static constexpr coda_dtype value = CODA_UINT8;
};
template <> struct dtype<std::int8_t> {
  static constexpr coda_dtype value = CODA_INT8;
};
template <> struct dtype<std::uint16_t> {
  static constexpr coda_dtype value = CODA_UINT16;
};
template <> struct dtype<std::int16_t> {
  static constexpr coda_dtype value = CODA_INT16;
};
template <> struct dtype<std::uint32_t> {
  static constexpr coda_dtype value = CODA_UINT32;
};
template <> struct dtype<std::int32_t> {
  static constexpr coda_dtype value = CODA_INT32;
};
template <> struct dtype<std::uint64_t> {
  static constexpr coda_dtype value = CODA_UINT64;
};
template <> struct dtype<std::int64_t> {
  static constexpr coda_dtype value = CODA_INT64;
};
template <> struct dtype<bool> {
  static constexpr coda_dtype value = CODA_BOOL;
};
} // namespace detail

// A coda_tensor that can be asked for its numbers. It holds no memory.
struct Tensor : coda_tensor {
  Tensor() : coda_tensor() {}

  std::vector<std::int64_t> shape() const { return std::vector<std::int64_t>(dims, dims + rank); }

  std::size_t size() const {
    const std::size_t element = coda_dtype_size(dtype);
    return element ? bytes / element : 0;
  }

  // The elements; throws std::invalid_argument if they are of another type.
  template <typename T> T *as() const {
    if (dtype != detail::dtype<std::remove_const_t<T>>::value)
      throw std::invalid_argument(std::string("the tensor is of ") + coda_dtype_name(dtype));
    return static_cast<T *>(data);
  }
};

// Memory of the caller's as a tensor of that shape. Inputs are only read.
template <typename T> Tensor tensor(T *data, std::initializer_list<std::int64_t> shape) {
  if (shape.size() > CODA_MAX_RANK)
    throw std::invalid_argument("a tensor has too many dimensions");
  Tensor t;
  t.data = const_cast<std::remove_const_t<T> *>(data);
  t.bytes = sizeof(T);
  t.dtype = detail::dtype<std::remove_const_t<T>>::value;
  for (const std::int64_t size : shape) {
    t.dims[t.rank++] = size;
    t.bytes *= static_cast<std::size_t>(size);
  }
  return t;
}

// Defaults for a program's options: of a structure whose `size` is right.
inline coda_model_options model_options() {
  coda_model_options options = {};
  options.size = sizeof options;
  return options;
}

inline coda_session_options session_options() {
  coda_session_options options = {};
  options.size = sizeof options;
  options.spin_us = -1;
  return options;
}

// An opened model. Threads may share it; sessions keep it alive.
class Model {
public:
  explicit Model(const std::string &path, const coda_model_options &options = model_options()) {
    open([&](coda_model **model, coda_error *error) { return coda_model_open(path.c_str(), &options, model, error); });
  }

  explicit Model(const coda_linked_model &linked, const coda_model_options &options = model_options()) {
    open(
        [&](coda_model **model, coda_error *error) { return coda_model_open_linked(&linked, &options, model, error); });
  }

  // A bundle in memory that stays as it is, aligned to 64 bytes.
  Model(const void *data, std::size_t size, const coda_model_options &options = model_options()) {
    open([&](coda_model **model, coda_error *error) {
      return coda_model_open_memory(data, size, &options, model, error);
    });
  }

  std::size_t inputs() const { return coda_model_input_count(get()); }
  std::size_t outputs() const { return coda_model_output_count(get()); }
  const coda_tensor_info &input(std::size_t index) const { return *coda_model_input(get(), index); }
  const coda_tensor_info &output(std::size_t index) const { return *coda_model_output(get(), index); }
  coda_model *get() const noexcept { return model_.get(); }

private:
  struct Free {
    void operator()(coda_model *model) const noexcept { coda_model_free(model); }
  };

  template <typename Open> void open(Open call) {
    coda_model *model = nullptr;
    detail::check([&](coda_error *error) { return call(&model, error); });
    model_.reset(model);
  }

  std::unique_ptr<coda_model, Free> model_;
};

// Runs a model; one thread at a time.
class Session {
public:
  explicit Session(const Model &model, const coda_session_options &options = session_options())
      : inputs_(model.inputs()), outputs_(model.outputs()) {
    coda_session *session = nullptr;
    detail::check([&](coda_error *error) { return coda_session_create(model.get(), &options, &session, error); });
    session_.reset(session);
  }

  // Outputs without data get memory of the session, valid until its next run.
  void run(const std::vector<Tensor> &inputs, std::vector<Tensor> &outputs) {
    if (inputs.size() != inputs_ || outputs.size() != outputs_)
      throw std::invalid_argument("the model has another number of inputs or outputs");
    const std::vector<coda_tensor> given(inputs.begin(), inputs.end());
    std::vector<coda_tensor> results(outputs.begin(), outputs.end());
    detail::check(
        [&](coda_error *error) { return coda_session_run(session_.get(), given.data(), results.data(), error); });
    for (std::size_t i = 0; i < results.size(); i++)
      static_cast<coda_tensor &>(outputs[i]) = results[i];
  }

  std::vector<Tensor> run(const std::vector<Tensor> &inputs) {
    std::vector<Tensor> outputs(outputs_);
    run(inputs, outputs);
    return outputs;
  }

  // Ends the run that another thread is in, and all that follow until it is called with false.
  void cancel(bool on = true) noexcept { coda_session_cancel(session_.get(), on); }

  coda_session *get() const noexcept { return session_.get(); }

private:
  struct Free {
    void operator()(coda_session *session) const noexcept { coda_session_free(session); }
  };

  std::size_t inputs_, outputs_;
  std::unique_ptr<coda_session, Free> session_;
};

} // namespace coda
#endif
