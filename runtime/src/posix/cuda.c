/* Runs plans on an NVIDIA GPU by the driver's interface (CUDA Driver API), which is opened at run time.
 *
 * A session has one stream, and one block of device memory that holds the arena, inputs and outputs of the shape that needs
 * most. The kernels of a shape are captured into a graph when it is met first: a run is then copies of the inputs, one launch,
 * and copies of the outputs. Inputs and outputs may be in memory of the host or of the device: the driver tells. */
#include "cuda.h"

#include <dlfcn.h>
#include <stdio.h>

#include "checked.h"
#include "platform.h"
#include "session.h"
#include "text.h"

typedef int cu_result;
typedef uint64_t cu_pointer;
typedef void *cu_handle;

enum {
  EARLY_VERSION = 12040, /* of the driver: captures kernels that start early */
  GRID_TOO_LARGE = -1, /* no driver's */
  CU_ERROR_OUT_OF_MEMORY = 2,
  CU_ERROR_NO_DEVICE = 100,
  CU_ERROR_NO_BINARY = 209,
  CU_ERROR_UNSUPPORTED_PTX = 222,
  CU_ATTRIBUTE_SHARED = 8, /* of a function: the most dynamic shared memory */
  CU_LAUNCH_EARLY = 6, /* programmatic stream serialization */
  CU_ATTRIBUTE_MAJOR = 75,
  CU_ATTRIBUTE_MINOR = 76,
  CU_CAPTURE_RELAXED = 2,
  CU_EVENT_DEFAULT = 0,
  CU_STREAM_DEFAULT = 0, /* waits for what others do on the default stream: their tensors may come of it */
  CU_STREAM_NON_BLOCKING = 1, /* does not: what others do there would break a capture */
};

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct {
  int id, padding;
  union {
    int allowed;
    char bytes[64];
  } value;
} launch_attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  cu_handle stream;
  launch_attribute *attributes;
  unsigned count;
} launch_config;

#define FUNCTIONS(F) \
  F(init, "cuInit", (unsigned)) \
  F(driver_version, "cuDriverGetVersion", (int *)) \
  F(count, "cuDeviceGetCount", (int *)) \
  F(get, "cuDeviceGet", (int *, int)) \
  F(name, "cuDeviceGetName", (char *, int, int)) \
  F(attribute, "cuDeviceGetAttribute", (int *, int, int)) \
  F(retain, "cuDevicePrimaryCtxRetain", (cu_handle *, int)) \
  F(release, "cuDevicePrimaryCtxRelease_v2", (int)) \
  F(push, "cuCtxPushCurrent_v2", (cu_handle)) \
  F(pop, "cuCtxPopCurrent_v2", (cu_handle *)) \
  F(module_load, "cuModuleLoadData", (cu_handle *, const void *)) \
  F(module_unload, "cuModuleUnload", (cu_handle)) \
  F(function, "cuModuleGetFunction", (cu_handle *, cu_handle, const char *)) \
  F(global, "cuModuleGetGlobal_v2", (cu_pointer *, size_t *, cu_handle, const char *)) \
  F(set_attribute, "cuFuncSetAttribute", (cu_handle, int, int)) \
  F(allocate, "cuMemAlloc_v2", (cu_pointer *, size_t)) \
  F(deallocate, "cuMemFree_v2", (cu_pointer)) \
  F(copy, "cuMemcpyAsync", (cu_pointer, cu_pointer, size_t, cu_handle)) \
  F(fill, "cuMemsetD32Async", (cu_pointer, unsigned, size_t, cu_handle)) \
  F(stream_create, "cuStreamCreate", (cu_handle *, unsigned)) \
  F(stream_destroy, "cuStreamDestroy_v2", (cu_handle)) \
  F(synchronize, "cuStreamSynchronize", (cu_handle)) \
  F(capture_begin, "cuStreamBeginCapture_v2", (cu_handle, int)) \
  F(capture_end, "cuStreamEndCapture", (cu_handle, cu_handle *)) \
  F(instantiate, "cuGraphInstantiateWithFlags", (cu_handle *, cu_handle, unsigned long long)) \
  F(graph_launch, "cuGraphLaunch", (cu_handle, cu_handle)) \
  F(graph_destroy, "cuGraphDestroy", (cu_handle)) \
  F(executable_destroy, "cuGraphExecDestroy", (cu_handle)) \
  F(launch, "cuLaunchKernel", \
    (cu_handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_handle, void **, void **)) \
  F(launch_early, "cuLaunchKernelEx", (const launch_config *, cu_handle, void **, void **)) \
  F(event_create, "cuEventCreate", (cu_handle *, unsigned)) \
  F(event_record, "cuEventRecord", (cu_handle, cu_handle)) \
  F(event_elapsed, "cuEventElapsedTime", (float *, cu_handle, cu_handle)) \
  F(event_destroy, "cuEventDestroy_v2", (cu_handle)) \
  F(error_string, "cuGetErrorString", (cu_result, const char **))

typedef struct {
#define DECLARE(field, symbol, parameters) cu_result(*field) parameters;
  FUNCTIONS(DECLARE)
#undef DECLARE
} driver;

struct coda_cuda {
  driver api;
  void *library;
  int device;
  cu_handle context, module;
  bool overlaps; /* kernels wait for those before them by themselves: they may start early */
  cu_handle *kernels; /* by the plan's kernel index */
  coda_block tables;
  cu_pointer constants, repacked;
  size_t first; /* the byte of the constants section that `constants` begins with */
};

/* What a session has on the device. */
typedef struct {
  cu_handle stream, capturing; /* capturing: records graphs, and runs nothing */
  cu_pointer memory, status; /* status: a word for each step, what its kernels found wrong */
  size_t bytes;
  cu_handle graphs[MAX_LAYOUTS];
  cu_handle *events; /* one more than steps; made when steps are timed */
  void **arguments;
  int32_t *found;
  coda_block tables;
} device_session;

/* --- the driver --------------------------------------------------------------------------------------------------- */

static coda_code driver_failed(const driver *api, cu_result result, const char *what, coda_error *error) {
  const char *text = NULL;
  if (api->error_string)
    api->error_string(result, &text);
  return coda_fail(error, result == CU_ERROR_OUT_OF_MEMORY ? CODA_ERROR_MEMORY : CODA_ERROR_TARGET,
                   "the GPU's driver does not %s: %s (CUDA error %d)", what, text ? text : "unknown", result);
}

static coda_code open_driver(coda_cuda *cuda, coda_error *error) {
  cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!cuda->library)
    return coda_fail(error, CODA_ERROR_TARGET,
                     "bundle needs an NVIDIA GPU, and this machine has no driver for one (libcuda.so.1): install it, or "
                     "build the bundle for a CPU target as well");
#define FIND(field, symbol, parameters) \
  { \
    void *found = dlsym(cuda->library, symbol); \
    memcpy(&cuda->api.field, &found, sizeof found); /* ISO C has no cast from object to function pointer */ \
    if (!found) \
      return coda_fail(error, CODA_ERROR_TARGET, \
                       "the NVIDIA driver of this machine is too old: it has no %s; version 525 or later has", symbol); \
  }
  FUNCTIONS(FIND)
#undef FIND
  return CODA_OK;
}

static coda_code open_device(coda_cuda *cuda, int32_t number, coda_error *error) {
  const driver *api = &cuda->api;
  int count = 0;
  cu_result result = api->init(0);
  if (!result)
    result = api->count(&count);
  if (result && result != CU_ERROR_NO_DEVICE)
    return driver_failed(api, result, "start", error);
  if (!count)
    return coda_fail(error, CODA_ERROR_TARGET, "bundle needs an NVIDIA GPU, and the driver finds none");
  if (number < 0 || number >= count)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "there is no GPU number %" PRId32 ": this machine has %d", number,
                     count);
  result = api->get(&cuda->device, number);
  if (!result)
    result = api->retain(&cuda->context, cuda->device);
  return result ? driver_failed(api, result, "open the GPU", error) : CODA_OK;
}

static coda_code load_module(coda_cuda *cuda, const coda_section *library, coda_error *error) {
  const driver *api = &cuda->api;
  char name[96] = "";
  int major = 0, minor = 0, version = 0;
  if (!library->size)
    return CODA_OK;
  api->push(cuda->context);
  const cu_result result = api->module_load(&cuda->module, library->data);
  api->attribute(&major, CU_ATTRIBUTE_MAJOR, cuda->device);
  api->driver_version(&version);
  if (!result && major >= 9 && version >= EARLY_VERSION)
    cuda->overlaps = !api->global(&(cu_pointer){0}, &(size_t){0}, cuda->module, "coda_overlaps");
  api->pop(&(cu_handle){NULL});
  if (!result)
    return CODA_OK;
  api->name(name, sizeof name, cuda->device);
  api->attribute(&minor, CU_ATTRIBUTE_MINOR, cuda->device);
  if (result == CU_ERROR_NO_BINARY || result == CU_ERROR_UNSUPPORTED_PTX)
    return coda_fail(error, CODA_ERROR_TARGET,
                     "bundle has no kernels for this GPU (%s, sm_%d%d) and a driver for CUDA %d.%d: build it for "
                     "cuda-sm%d%d, or install a newer driver",
                     name, major, minor, version / 1000, version % 1000 / 10, major, minor);
  return driver_failed(api, result, "load the bundle's kernels", error);
}

coda_code coda_cuda_open(const coda_section *library, int32_t device, const coda_allocator *allocator,
                         coda_cuda **result, coda_error *error) {
  *result = NULL;
  coda_cuda *cuda = allocator->allocate(allocator->context, sizeof *cuda, CODA_ALIGNMENT);
  if (!cuda)
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a GPU");
  memset(cuda, 0, sizeof *cuda);
  coda_code code = open_driver(cuda, error);
  if (!code)
    code = open_device(cuda, device, error);
  if (!code)
    code = load_module(cuda, library, error);
  if (code)
    coda_cuda_close(cuda, allocator);
  else
    *result = cuda;
  return code;
}

void coda_cuda_close(coda_cuda *cuda, const coda_allocator *allocator) {
  if (!cuda)
    return;
  const driver *api = &cuda->api;
  if (cuda->context) {
    api->push(cuda->context);
    if (cuda->constants)
      api->deallocate(cuda->constants);
    if (cuda->repacked)
      api->deallocate(cuda->repacked);
    if (cuda->module)
      api->module_unload(cuda->module);
    api->pop(&(cu_handle){NULL});
    api->release(cuda->device);
  }
  if (cuda->library)
    dlclose(cuda->library);
  coda_block_free(&cuda->tables, allocator);
  allocator->release(allocator->context, cuda, sizeof *cuda);
}

/* --- loading ------------------------------------------------------------------------------------------------------ */

enum {
  LAUNCH_INTS = 5, /* the grid, the threads of a block, the bytes of its shared memory */
  MOST_BLOCKS = 65535, /* along the second and the third axis of a grid */
};

static uint32_t launches(const plan_step *step) { return step->finish >= 0 ? 2 : 1; }

static coda_code upload(coda_cuda *cuda, const uint8_t *data, size_t bytes, cu_pointer *to, coda_error *error) {
  if (!bytes)
    return CODA_OK;
  cu_result result = cuda->api.allocate(to, bytes);
  if (!result)
    result = cuda->api.copy(*to, (uintptr_t)data, bytes, NULL);
  if (!result)
    result = cuda->api.synchronize(NULL);
  return result ? driver_failed(&cuda->api, result, "take the weights", error) : CODA_OK;
}

static coda_code upload_constants(coda_cuda *cuda, const coda_model *model, coda_error *error) {
  const coda_plan *plan = &model->plan;
  size_t begin = model->constants.size, end = 0;
  for (uint32_t i = 0; i < plan->buffer_count; i++) {
    const plan_buffer *b = &plan->buffers[i];
    if (b->kind != BUFFER_CONSTANT)
      continue;
    const size_t last = (size_t)b->index + (size_t)plan->exprs[b->size].a;
    begin = b->index < begin ? (size_t)b->index : begin;
    end = last > end ? last : end;
  }
  cuda->first = begin;
  coda_code code = CODA_OK;
  if (end > begin)
    code = upload(cuda, model->constants.data + begin, end - begin, &cuda->constants, error);
  return code ? code : upload(cuda, model->repacked.data, plan->repacked_bytes, &cuda->repacked, error);
}

static coda_code find_kernels(coda_cuda *cuda, const coda_plan *plan, coda_error *error) {
  for (uint32_t i = 0; i < plan->step_count; i++)
    if (plan->steps[i].int_count < LAUNCH_INTS * launches(&plan->steps[i]))
      return coda_fail(error, CODA_ERROR_BUNDLE, "bundle does not say how step '%s' is started on a GPU",
                       plan->steps[i].name);
  for (uint32_t i = 0; i < plan->kernel_count; i++)
    if (!cuda->module || cuda->api.function(&cuda->kernels[i], cuda->module, plan->kernels[i]))
      return coda_fail(error, CODA_ERROR_BUNDLE, "bundle's kernel library has no kernel '%s'", plan->kernels[i]);
  return CODA_OK;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* A run, as its parts see it. */
typedef struct {
  coda_cuda *cuda;
  coda_session *session;
  device_session *own;
  coda_layout *layout;
  cu_handle stream;
  bool captured;
} device_run;

static size_t io_bytes(const coda_layout *layout, uint32_t index) {
  return coda_padded((size_t)layout->tensor_bytes[index] + 1);
}

static coda_code make_session(coda_cuda *cuda, coda_session *session, coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  const coda_allocator *allocator = &session->allocator;
  const size_t own = coda_padded(sizeof(device_session)),
               events = coda_padded(((size_t)plan->step_count + 1) * sizeof(cu_handle)),
               arguments = coda_padded(((size_t)plan->max_operands + plan->max_ints + 1) * sizeof(void *)),
               found = coda_padded((size_t)plan->step_count * sizeof(int32_t) + 1);
  coda_block block = {NULL, 0};
  if (coda_block_reserve(&block, own + events + arguments + found, CODA_ALIGNMENT, allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a session on a GPU");
  memset(block.data, 0, block.bytes);
  device_session *made = (device_session *)block.data;
  made->events = (cu_handle *)(block.data + own);
  made->arguments = (void **)(block.data + own + events);
  made->found = (int32_t *)(block.data + own + events + arguments);
  made->tables = block;
  session->device = made;
  const size_t words = (size_t)plan->step_count + 1;
  cu_result result = cuda->api.stream_create(&made->stream, CU_STREAM_DEFAULT);
  if (!result)
    result = cuda->api.stream_create(&made->capturing, CU_STREAM_NON_BLOCKING);
  if (!result)
    result = cuda->api.allocate(&made->status, words * sizeof(int32_t));
  if (!result)
    result = cuda->api.fill(made->status, 0, words, made->stream);
  return result ? driver_failed(&cuda->api, result, "make a stream", error) : CODA_OK;
}

static void drop_graph(coda_cuda *cuda, device_session *own, size_t index) {
  if (own->graphs[index])
    cuda->api.executable_destroy(own->graphs[index]);
  own->graphs[index] = NULL;
}

static void free_session(coda_session *session) {
  device_session *own = session->device;
  coda_cuda *cuda = session->model->cuda;
  if (!own)
    return;
  cuda->api.push(cuda->context);
  for (size_t i = 0; i < MAX_LAYOUTS; i++)
    drop_graph(cuda, own, i);
  for (uint32_t i = 0; own->events[0] && i <= session->model->plan.step_count; i++)
    cuda->api.event_destroy(own->events[i]);
  if (own->memory)
    cuda->api.deallocate(own->memory);
  if (own->status)
    cuda->api.deallocate(own->status);
  if (own->stream)
    cuda->api.stream_destroy(own->stream);
  if (own->capturing)
    cuda->api.stream_destroy(own->capturing);
  cuda->api.pop(&(cu_handle){NULL});
  session->device = NULL;
  coda_block tables = own->tables;
  coda_block_free(&tables, &session->allocator);
}

/* Where an input, or behind them an output, lies on the device. */
static cu_pointer io_address(const device_run *r, uint32_t index) {
  cu_pointer at = r->own->memory + coda_padded(r->layout->arenas[0].bytes + 1);
  for (uint32_t i = 0; i < index; i++)
    at += io_bytes(r->layout, i);
  return at;
}

/* Device memory for the layout, and the addresses of its buffers there. */
static coda_code place(const device_run *r, coda_error *error) {
  const coda_model *model = r->session->model;
  const coda_plan *plan = &model->plan;
  const driver *api = &r->cuda->api;
  size_t bytes = coda_padded(r->layout->arenas[0].bytes + 1);
  for (uint32_t i = 0; i < plan->input_count + plan->output_count; i++)
    if (!coda_add_size(bytes, io_bytes(r->layout, i), &bytes))
      return coda_fail(error, CODA_ERROR_MEMORY, "no memory for tensors as large as these");
  if (bytes > r->own->bytes) {
    cu_result result = api->synchronize(r->own->stream);
    if (r->own->memory)
      api->deallocate(r->own->memory);
    r->own->memory = 0, r->own->bytes = 0;
    if (!result)
      result = api->allocate(&r->own->memory, bytes);
    if (result)
      return driver_failed(api, result, "give memory for tensors", error);
    r->own->bytes = bytes;
  }
  const uint8_t *arena = (const uint8_t *)(uintptr_t)r->own->memory;
  if (r->layout->arenas[0].memory == arena && r->own->graphs[r->layout - r->session->layouts])
    return CODA_OK;
  drop_graph(r->cuda, r->own, (size_t)(r->layout - r->session->layouts));
  coda_layout_place(r->layout, plan, 0, (const uint8_t *)(uintptr_t)(r->cuda->constants - r->cuda->first),
                    (const uint8_t *)(uintptr_t)r->cuda->repacked, arena);
  return CODA_OK;
}

static void place_tensors(const device_run *r) {
  const coda_session *session = r->session;
  for (uint32_t i = 0; i < session->slot_count; i++) {
    const io_slot *s = &session->slots[i];
    r->layout->addresses[s->slot] = io_address(r, s->index + (s->output ? session->model->plan.input_count : 0));
  }
}

static cu_result launch(const device_run *r, cu_handle kernel, const int64_t *how) {
  const driver *api = &r->cuda->api;
  if (how[0] <= 0 || how[1] <= 0 || how[2] <= 0)
    return 0;
  if (how[0] > INT32_MAX || how[1] > MOST_BLOCKS || how[2] > MOST_BLOCKS)
    return GRID_TOO_LARGE;
  cu_result result = how[4] > 48 << 10 ? api->set_attribute(kernel, CU_ATTRIBUTE_SHARED, (int)how[4]) : 0;
  if (!result && r->captured && r->cuda->overlaps) {
    launch_attribute early = {.id = CU_LAUNCH_EARLY, .value.allowed = 1};
    const launch_config config = {{(unsigned)how[0], (unsigned)how[1], (unsigned)how[2]},
                                  {(unsigned)how[3], 1, 1},
                                  (unsigned)how[4],
                                  r->stream,
                                  &early,
                                  1};
    return api->launch_early(&config, kernel, r->own->arguments, NULL);
  }
  if (!result)
    result = api->launch(kernel, (unsigned)how[0], (unsigned)how[1], (unsigned)how[2], (unsigned)how[3], 1, 1,
                         (unsigned)how[4], r->stream, r->own->arguments, NULL);
  return result;
}

/* All kernels on the stream, in order, with an event behind each if there are events. */
static coda_code launch_steps(const device_run *r, bool timed, coda_error *error) {
  const coda_plan *plan = &r->session->model->plan;
  const driver *api = &r->cuda->api;
  uint64_t *addresses = r->layout->addresses;
  int64_t *ints = r->layout->ints;
  cu_result result = timed ? api->event_record(r->own->events[0], r->stream) : 0;
  for (uint32_t i = 0; i < plan->step_count && !result; i++) {
    const plan_step *step = &plan->steps[i];
    const uint32_t count = step->int_count - LAUNCH_INTS * launches(step);
    cu_pointer status = r->own->status + i * sizeof(int32_t);
    void **argument = r->own->arguments;
    for (uint32_t k = 0; k < step->buffer_count; k++)
      *argument++ = &addresses[k];
    for (uint32_t k = 0; k < count; k++)
      *argument++ = &ints[k];
    *argument = &status; /* behind all that a kernel has: those that find nothing wrong do not read it */
    if (r->layout->values[step->items]) {
      result = launch(r, r->cuda->kernels[step->kernel], ints + count);
      if (!result && step->finish >= 0)
        result = launch(r, r->cuda->kernels[step->finish], ints + count + LAUNCH_INTS);
    }
    if (result == GRID_TOO_LARGE)
      return coda_fail(error, CODA_ERROR_SHAPE,
                       "step '%s' would have more blocks than a GPU starts at once (%d along an axis): run smaller "
                       "batches",
                       step->name, MOST_BLOCKS);
    if (result)
      return driver_failed(api, result, step->name, error);
    if (timed)
      result = api->event_record(r->own->events[i + 1], r->stream);
    addresses += step->buffer_count;
    ints += step->int_count;
  }
  return result ? driver_failed(api, result, "record an event", error) : CODA_OK;
}

static coda_code capture(const device_run *r, cu_handle *executable, coda_error *error) {
  const driver *api = &r->cuda->api;
  device_run recorded = *r;
  recorded.stream = r->own->capturing;
  recorded.captured = true;
  cu_handle graph = NULL;
  cu_result result = api->capture_begin(recorded.stream, CU_CAPTURE_RELAXED);
  if (result)
    return driver_failed(api, result, "capture a graph", error);
  coda_code code = launch_steps(&recorded, false, error);
  result = api->capture_end(recorded.stream, &graph);
  if (!code && !result)
    result = api->instantiate(executable, graph, 0);
  if (graph)
    api->graph_destroy(graph);
  if (!code && result)
    code = driver_failed(api, result, "make a graph of the run", error);
  return code;
}

/* Steps one by one, each timed. */
static coda_code run_timed(const device_run *r, coda_error *error) {
  const driver *api = &r->cuda->api;
  const coda_plan *plan = &r->session->model->plan;
  cu_result result = 0;
  for (uint32_t i = 0; !r->own->events[plan->step_count] && i <= plan->step_count && !result; i++)
    result = api->event_create(&r->own->events[i], CU_EVENT_DEFAULT);
  if (result)
    return driver_failed(api, result, "make an event", error);
  const int64_t start = coda_clock_ns();
  coda_code code = launch_steps(r, true, error);
  if (!code && (result = api->synchronize(r->own->stream)) != 0)
    code = driver_failed(api, result, "end the run", error);
  int64_t before = start;
  for (uint32_t i = 0; i < plan->step_count && !code; i++) {
    float ms = 0;
    result = api->event_elapsed(&ms, r->own->events[0], r->own->events[i + 1]);
    if (result)
      return driver_failed(api, result, "tell the time", error);
    const int64_t now = start + (int64_t)((double)ms * 1e6);
    r->session->timer(r->session->timer_context, i, plan->steps[i].name, before, now);
    before = now;
  }
  return code;
}

static coda_code run_kernels(const device_run *r, coda_error *error) {
  cu_handle *graph = &r->own->graphs[r->layout - r->session->layouts];
  if (r->session->timer)
    return run_timed(r, error);
  if (r->session->run_count) /* ints that differ from run to run: a graph would keep the first ones */
    return launch_steps(r, false, error);
  const coda_code code = *graph ? CODA_OK : capture(r, graph, error);
  if (code)
    return code;
  const cu_result result = r->cuda->api.graph_launch(*graph, r->own->stream);
  return result ? driver_failed(&r->cuda->api, result, "start the run", error) : CODA_OK;
}

/* What kernels left in the status words. */
static coda_code check_status(const device_run *r, coda_error *error) {
  const coda_plan *plan = &r->session->model->plan;
  for (uint32_t i = 0; i < plan->step_count; i++)
    if (r->own->found[i]) {
      const plan_step *step = &plan->steps[i];
      r->cuda->api.fill(r->own->status, 0, plan->step_count, r->own->stream);
      return coda_fail(error, CODA_ERROR_DATA, "an index is out of range in step '%s'%s%s", step->name,
                       *step->source ? ", from " : "", step->source);
    }
  return CODA_OK;
}

static coda_code run_on_device(const device_run *r, const coda_tensor *inputs, const coda_tensor *outputs,
                               coda_error *error) {
  const coda_plan *plan = &r->session->model->plan;
  const driver *api = &r->cuda->api;
  cu_handle stream = r->own->stream;
  coda_code code = place(r, error);
  if (code)
    return code;
  place_tensors(r);
  cu_result result = 0;
  for (uint32_t i = 0; i < plan->input_count && !result; i++)
    if (r->layout->tensor_bytes[i])
      result = api->copy(io_address(r, i), (uintptr_t)inputs[i].data, (size_t)r->layout->tensor_bytes[i], stream);
  if (result)
    return driver_failed(api, result, "take the inputs", error);
  code = run_kernels(r, error);
  if (code)
    return code;
  for (uint32_t i = 0; i < plan->output_count && !result; i++) {
    const uint32_t index = plan->input_count + i;
    if (r->layout->tensor_bytes[index])
      result = api->copy((uintptr_t)outputs[i].data, io_address(r, index), (size_t)r->layout->tensor_bytes[index],
                         stream);
  }
  if (!result && plan->step_count)
    result = api->copy((uintptr_t)r->own->found, r->own->status, plan->step_count * sizeof(int32_t), stream);
  if (!result)
    result = api->synchronize(stream);
  return result ? driver_failed(api, result, "end the run", error) : check_status(r, error);
}

static coda_code check_cancelled(const coda_session *session, coda_error *error) {
  if (!atomic_load_explicit(&session->cancelled, memory_order_relaxed))
    return CODA_OK;
  return coda_fail(error, CODA_ERROR_CANCELLED, "the run was cancelled");
}

static coda_code run(coda_session *session, coda_layout *layout, const coda_tensor *inputs, coda_tensor *outputs,
                     coda_error *error) {
  coda_cuda *cuda = session->model->cuda;
  cuda->api.push(cuda->context);
  coda_code code = session->device ? CODA_OK : make_session(cuda, session, error);
  if (code) {
    free_session(session); /* what there is of it */
  } else {
    device_session *own = session->device;
    const device_run r = {cuda, session, own, layout, own->stream, false};
    code = check_cancelled(session, error);
    if (!code)
      code = run_on_device(&r, inputs, outputs, error);
    if (code)
      cuda->api.synchronize(r.stream); /* the caller's memory may still be copied */
    else
      code = check_cancelled(session, error);
  }
  cuda->api.pop(&(cu_handle){NULL});
  return code;
}

static const coda_device_ops OPERATIONS = {run, free_session};

coda_code coda_cuda_load(coda_cuda *cuda, coda_model *model, coda_error *error) {
  const coda_plan *plan = &model->plan;
  if (plan->phase_count > 1)
    return coda_fail(error, CODA_ERROR_TARGET, "data decides sizes of this model, which GPUs do not run yet");
  if (coda_block_reserve(&cuda->tables, (size_t)plan->kernel_count * sizeof(cu_handle) + 1, CODA_ALIGNMENT,
                         &model->allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a table of kernels");
  cuda->kernels = (cu_handle *)cuda->tables.data;
  cuda->api.push(cuda->context);
  coda_code code = find_kernels(cuda, plan, error);
  if (!code)
    code = upload_constants(cuda, model, error);
  cuda->api.pop(&(cu_handle){NULL});
  if (!code) {
    model->cuda = cuda;
    model->device = &OPERATIONS;
  }
  return code;
}
