// coda_edge._runtime: the C runtime for Python. coda_edge/session.py is what users see.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coda.h"

namespace nb = nanobind;

namespace {

// Strings of a bundle should be UTF-8; one that is not must still be shown.
nb::str text(const char *s) {
  return nb::steal<nb::str>(PyUnicode_DecodeUTF8(s, (Py_ssize_t)std::strlen(s), "replace"));
}

[[noreturn]] void raise(const coda_error &error) {
  static const std::map<coda_code, const char *> classes = {
      {CODA_ERROR_FILE, "BundleError"}, {CODA_ERROR_BUNDLE, "BundleError"}, {CODA_ERROR_TARGET, "TargetError"},
      {CODA_ERROR_SHAPE, "ShapeError"}, {CODA_ERROR_DATA, "DataError"},
      {CODA_ERROR_CANCELLED, "CancelledError"},
      {CODA_ERROR_SIGNATURE, "SignatureError"},
  };
  if (error.code == CODA_ERROR_MEMORY) {
    PyErr_SetString(PyExc_MemoryError, error.message);
  } else {
    const auto found = classes.find(error.code);
    const nb::object type =
        nb::module_::import_("coda_edge.errors").attr(found == classes.end() ? "CodaError" : found->second);
    PyErr_SetObject(type.ptr(), text(error.message).ptr());
  }
  throw nb::python_error();
}

// A run's tensors, and the buffers that keep their memory in place.
class Tensors {
public:
  Tensors(const nb::list &given, bool writable) : tensors(given.size()), views(given.size()) {
    for (size_t i = 0; i < given.size(); i++)
      if (!given[i].is_none())
        fill(tensors[i], views[i].view, nb::cast<nb::tuple>(given[i]), writable);
  }

  std::vector<coda_tensor> tensors;

private:
  struct View {
    View() = default;
    ~View() { PyBuffer_Release(&view); } // does nothing for one that was never filled
    View(const View &) = delete;
    View &operator=(const View &) = delete;
    Py_buffer view = {};
  };

  // (element type, array)
  static void fill(coda_tensor &tensor, Py_buffer &view, const nb::tuple &pair, bool writable) {
    const nb::object array = pair[1];
    if (nb::hasattr(array, "address")) { // on a GPU: coda_edge.device_array
      const nb::tuple shape = nb::cast<nb::tuple>(array.attr("shape"));
      tensor.data = (void *)nb::cast<uintptr_t>(array.attr("address"));
      tensor.bytes = nb::cast<size_t>(array.attr("nbytes"));
      tensor.dtype = nb::cast<int32_t>(pair[0]);
      tensor.rank = (int32_t)shape.size();
      for (size_t axis = 0; axis < shape.size() && axis < CODA_MAX_RANK; axis++)
        tensor.dims[axis] = nb::cast<int64_t>(shape[axis]);
      return;
    }
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) != 0)
      throw nb::python_error();
    tensor.data = view.buf;
    tensor.bytes = (size_t)view.len;
    tensor.dtype = nb::cast<int32_t>(pair[0]);
    tensor.rank = view.ndim;
    for (int axis = 0; axis < view.ndim && axis < CODA_MAX_RANK; axis++)
      tensor.dims[axis] = view.shape[axis];
  }

  std::vector<View> views;
};

// Memory of outputs. What an array leaves behind when it dies is what a later run of the session writes to: fresh memory would
// be given by the system page by page.
class Blocks {
public:
  ~Blocks() {
    for (const auto &[bytes, data] : unused_)
      std::free(data);
  }

  // At least `bytes`, and less than twice as many: (data, size).
  std::pair<void *, size_t> take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::pair<size_t, void *> block = {rounded(bytes), nullptr};
    const auto found = unused_.lower_bound(bytes);
    if (found != unused_.end() && found->first / 2 < bytes) {
      block = *found;
      unused_.erase(found);
      unused_bytes_ -= block.first;
    } else {
      block.second = std::aligned_alloc(64, block.first);
      if (!block.second)
        throw std::bad_alloc();
    }
    used_bytes_ += block.first;
    most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
    return {block.second, block.first};
  }

  // Keeps no more than were ever in use at a time.
  void give_back(void *data, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    used_bytes_ -= size;
    unused_bytes_ += size;
    unused_.emplace(size, data);
    while (unused_bytes_ > most_used_bytes_) {
      unused_bytes_ -= unused_.begin()->first;
      std::free(unused_.begin()->second);
      unused_.erase(unused_.begin());
    }
  }

private:
  // An eighth more at most: the keys and values of a generated text grow a little with each run.
  static size_t rounded(size_t bytes) {
    size_t unit = 64;
    while (unit * 16 < bytes)
      unit *= 2;
    return (bytes + unit - 1) / unit * unit;
  }

  std::mutex mutex_;
  std::multimap<size_t, void *> unused_;
  size_t unused_bytes_ = 0, used_bytes_ = 0, most_used_bytes_ = 0;
};

// One of them, with Python's buffer protocol.
class Block {
public:
  Block(std::shared_ptr<Blocks> owner, size_t bytes) : owner_(std::move(owner)), bytes_(bytes) {
    std::tie(data_, size_) = owner_->take(bytes);
  }
  ~Block() { owner_->give_back(data_, size_); }
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;

  static int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    const Block *block = nb::inst_ptr<Block>(self);
    return PyBuffer_FillInfo(view, self, block->data_, (Py_ssize_t)block->bytes_, 0, flags);
  }

private:
  std::shared_ptr<Blocks> owner_;
  void *data_ = nullptr;
  size_t size_ = 0, bytes_;
};

PyType_Slot block_slots[] = {{Py_bf_getbuffer, (void *)&Block::get_buffer}, {0, nullptr}};

class Session {
public:
  Session(const nb::object &source, int32_t threads, uint64_t seed, const std::string &target, const nb::bytes &key) {
    coda_error error;
    coda_code code;
    coda_model_options model_options = {};
    model_options.size = sizeof model_options;
    model_options.target = target.empty() ? nullptr : target.c_str();
    model_options.key = key.size() ? (const uint8_t *)key.c_str() : nullptr;
    if (nb::isinstance<nb::bytes>(source)) {
      const nb::bytes bytes = nb::cast<nb::bytes>(source);
      memory_ = std::aligned_alloc(64, (bytes.size() + 64) / 64 * 64);
      if (!memory_)
        throw std::bad_alloc();
      std::memcpy(memory_, bytes.c_str(), bytes.size());
      nb::gil_scoped_release release;
      code = coda_model_open_memory(memory_, bytes.size(), &model_options, &model_, &error);
    } else {
      const std::string path = nb::cast<std::string>(source);
      nb::gil_scoped_release release;
      code = coda_model_open(path.c_str(), &model_options, &model_, &error);
    }
    if (code == CODA_OK) {
      coda_session_options options = {};
      options.size = sizeof options;
      options.threads = threads;
      options.spin_us = -1;
      options.seed = seed;
      code = coda_session_create(model_, &options, &session_, &error);
    }
    if (code != CODA_OK) {
      close();
      raise(error);
    }
  }
  ~Session() { close(); }
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // Waits for a run in another thread. Whoever holds the GIL sees the session whole or closed.
  void close() {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    coda_session *session;
    coda_model *model;
    void *memory;
    {
      nb::gil_scoped_acquire acquire; // no thread waits for the mutex with the GIL
      session = std::exchange(session_, nullptr);
      model = std::exchange(model_, nullptr);
      memory = std::exchange(memory_, nullptr);
    }
    coda_session_free(session);
    coda_model_free(model);
    std::free(memory);
  }

  nb::list tensors(bool outputs) {
    check_open();
    nb::list result;
    const size_t count = outputs ? coda_model_output_count(model_) : coda_model_input_count(model_);
    for (size_t i = 0; i < count; i++) {
      const coda_tensor_info *info = outputs ? coda_model_output(model_, i) : coda_model_input(model_, i);
      nb::list dims;
      for (int32_t axis = 0; axis < info->rank; axis++)
        if (info->dims[axis] >= 0)
          dims.append(info->dims[axis]);
        else
          dims.append(text(info->dim_text[axis]));
      result.append(nb::make_tuple(text(info->name), info->dtype, dims));
    }
    return result;
  }

  nb::dict metadata() {
    check_open();
    nb::dict result;
    const char *key, *value;
    for (size_t i = 0; coda_model_metadata(model_, i, &key, &value) == 0; i++)
      result[text(key)] = text(value);
    return result;
  }

  nb::str target() {
    check_open();
    return text(coda_model_target(model_));
  }

  nb::list held_targets() {
    check_open();
    nb::list result;
    for (size_t i = 0; const char *name = coda_model_held_target(model_, i); i++)
      result.append(text(name));
    return result;
  }

  nb::list shapes(const nb::list &inputs) {
    const Tensors given(inputs, false);
    std::vector<coda_tensor> outputs;
    call([&](coda_error *error) {
      outputs.resize(coda_model_output_count(model_));
      return coda_session_shapes(session_, given.tensors.data(), outputs.data(), error);
    });
    nb::list result;
    for (const coda_tensor &output : outputs) {
      nb::list dims;
      for (int32_t axis = 0; axis < output.rank; axis++)
        dims.append(output.dims[axis]);
      result.append(nb::tuple(dims));
    }
    return result;
  }

  // The outputs numbered `copied`, whose sizes only the run tells, are returned.
  nb::list run(const nb::list &inputs, const nb::list &outputs, const std::vector<size_t> &copied) {
    const Tensors given(inputs, false);
    Tensors results(outputs, true);
    nb::list copies;
    call([&](coda_error *error) {
      const coda_code code = coda_session_run(session_, given.tensors.data(), results.tensors.data(), error);
      if (code == CODA_OK && !copied.empty()) {
        nb::gil_scoped_acquire acquire; // no thread waits for the mutex with the GIL
        for (const size_t i : copied)
          copies.append(copy(results.tensors.at(i)));
      }
      return code;
    });
    return copies;
  }

  Block *memory(size_t bytes) { return new Block(blocks_, bytes); }

  void seed(uint64_t seed) {
    call([&](coda_error *error) { return coda_session_seed(session_, seed, error); });
  }

  // By any thread, while another one runs: without the mutex. Whoever holds the GIL sees the session whole.
  void cancel(bool on) {
    check_open();
    coda_session_cancel(session_, on);
  }

  nb::dict data_sizes() {
    std::vector<std::pair<const char *, int64_t>> sizes;
    call([&](coda_error *) {
      const char *name;
      int64_t value;
      while (coda_session_data_size(session_, sizes.size(), &name, &value) == 0)
        sizes.emplace_back(name, value);
      return CODA_OK;
    });
    nb::dict result;
    for (const auto &[name, value] : sizes)
      result[text(name)] = value;
    return result;
  }

  // Runs `rounds` times into the session's memory. A step that a run left out for its sizes has taken no time.
  nb::list profile(const nb::list &inputs, size_t rounds) {
    const Tensors given(inputs, false);
    nb::list result;
    call([&](coda_error *error) {
      std::vector<Times> times(coda_model_step_count(model_));
      std::vector<coda_step_cost> costs(times.size());
      for (Times &of_step : times)
        of_step.reserve(rounds);
      std::vector<coda_tensor> outputs(coda_model_output_count(model_));
      coda_code code = coda_session_set_timer(session_, &note_time, times.data(), error);
      for (size_t round = 0; round < rounds && code == CODA_OK; round++) {
        std::fill(outputs.begin(), outputs.end(), coda_tensor{});
        code = coda_session_run(session_, given.tensors.data(), outputs.data(), error);
      }
      coda_session_set_timer(session_, nullptr, nullptr, nullptr);
      if (code == CODA_OK) {
        coda_session_costs(session_, costs.data(), costs.size());
        nb::gil_scoped_acquire acquire; // no thread waits for the mutex with the GIL
        for (size_t i = 0; i < times.size(); i++)
          result.append(profiled(*coda_model_step(model_, i), times[i], costs[i]));
      }
      return code;
    });
    return result;
  }

  int32_t threads() {
    check_open();
    return coda_session_threads(session_);
  }

  size_t arena_bytes() {
    size_t bytes = 0;
    call([&](coda_error *) {
      bytes = coda_session_arena_bytes(session_);
      return CODA_OK;
    });
    return bytes;
  }

private:
  using Times = std::vector<int64_t>;

  static void note_time(void *context, size_t step, const char *, int64_t begin_ns, int64_t end_ns) {
    static_cast<Times *>(context)[step].push_back(end_ns - begin_ns);
  }

  static nb::tuple profiled(const coda_step_info &step, const Times &times, const coda_step_cost &cost) {
    nb::list ns;
    for (const int64_t taken : times)
      ns.append(taken);
    return nb::make_tuple(text(step.name), text(step.kernel), text(step.source), ns, cost.flops, cost.bytes);
  }

  // (dims, data)
  static nb::tuple copy(const coda_tensor &tensor) {
    nb::list dims;
    for (int32_t axis = 0; axis < tensor.rank; axis++)
      dims.append(tensor.dims[axis]);
    PyObject *data = PyByteArray_FromStringAndSize((const char *)tensor.data, (Py_ssize_t)tensor.bytes);
    if (!data)
      throw nb::python_error();
    return nb::make_tuple(nb::tuple(dims), nb::steal<nb::object>(data));
  }

  void check_open() const {
    if (!session_)
      raise({CODA_ERROR_ARGUMENT, "the session is closed: open the bundle again"});
  }

  // Calls into the runtime without the GIL, one thread at a time.
  template <typename Function> void call(Function function) {
    coda_error error = {CODA_ERROR_ARGUMENT, "the session is closed: open the bundle again"};
    coda_code code = CODA_ERROR_ARGUMENT;
    {
      nb::gil_scoped_release release;
      std::lock_guard<std::mutex> lock(mutex_);
      if (session_)
        code = function(&error);
    }
    if (code != CODA_OK)
      raise(error);
  }

  std::mutex mutex_;
  const std::shared_ptr<Blocks> blocks_ = std::make_shared<Blocks>();
  void *memory_ = nullptr; // an aligned copy of a bundle given as bytes
  coda_model *model_ = nullptr;
  coda_session *session_ = nullptr;
};

std::vector<std::string> cpu_features() {
  std::vector<const char *> names(coda_cpu_features(nullptr, 0));
  coda_cpu_features(names.data(), names.size());
  return std::vector<std::string>(names.begin(), names.end());
}

bool signature_valid(const nb::bytes &key, const nb::bytes &message, const nb::bytes &signature) {
  if (key.size() != CODA_KEY_BYTES || signature.size() != 64)
    return false;
  return coda_signature_valid((const uint8_t *)key.c_str(), message.c_str(), message.size(),
                              (const uint8_t *)signature.c_str()) == 1;
}

} // namespace

NB_MODULE(_runtime, m) {
  m.attr("version") = coda_version();
  m.def("cpu_features", &cpu_features, "Names of this CPU's features that a bundle may ask for.");
  m.def("cpu_cores", &coda_cpu_cores, "How many cores this process may use.");
  m.def("signature_valid", &signature_valid, nb::arg("key"), nb::arg("message"), nb::arg("signature"),
        "Whether an Ed25519 signature, 64 bytes, is that of the message by the owner of the key, 32 bytes.");
  m.def("dtype_name", &coda_dtype_name, nb::arg("dtype"), "numpy's name of an element type given by its ONNX number.");
  nb::class_<Block>(m, "Block", nb::type_slots(block_slots), "Bytes that arrays can share.");
  nb::class_<Session>(m, "Session")
      .def(nb::init<nb::object, int32_t, uint64_t, std::string, nb::bytes>(), nb::arg("source"), nb::arg("threads"),
           nb::arg("seed"), nb::arg("target"), nb::arg("key"))
      .def("close", &Session::close)
      .def("tensors", &Session::tensors, nb::arg("outputs"),
           "(name, element type, dims) of each input, or of each output.")
      .def("metadata", &Session::metadata)
      .def("target", &Session::target)
      .def("held_targets", &Session::held_targets)
      .def("shapes", &Session::shapes, nb::arg("inputs"),
           "The outputs' dims for inputs given as (element type, array) or None; -1 where data decides.")
      .def("run", &Session::run, nb::arg("inputs"), nb::arg("outputs"), nb::arg("copied"),
           "Runs, and returns (dims, data) of the outputs numbered `copied`.")
      .def("memory", &Session::memory, nb::arg("bytes"), "Memory for an output, that of one that is gone if there is any.")
      .def("cancel", &Session::cancel, nb::arg("on"), "Ends runs, of other threads too, until it is called with False.")
      .def("seed", &Session::seed, nb::arg("seed"))
      .def("data_sizes", &Session::data_sizes, "What data decided in the last run, by name.")
      .def("profile", &Session::profile, nb::arg("inputs"), nb::arg("rounds"),
           "Runs, and returns (name, kernel, source, nanoseconds in each round, flops, bytes) of each step.")
      .def("threads", &Session::threads)
      .def("arena_bytes", &Session::arena_bytes);
}
