/* A node's kernel: finds its constants when it is made, and runs its steps on onnxruntime's threads, in onnxruntime's
 * memory. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "operators.h"

enum {
  ERROR_INDEX = 1, /* the kernels' code for an index out of range */
  MAX_NAME = 128,
  CHUNKS_PER_CORE = 4,
  MAX_SLOTS = 64, /* scratch areas of a step, one for each thread that is in a kernel */
};

typedef struct {
  const OrtApi *api;
  const coda_operator *op;
  OrtMemoryInfo *memory;
  uint64_t constants[MAX_TENSORS]; /* addresses of the inputs that are constant; 0: it is none */
  uint64_t *weights; /* addresses of what the library holds */
  int64_t cores;
  char name[MAX_NAME];
} node_kernel;

/* --- making ------------------------------------------------------------------------------------------------------- */

static size_t padded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static OrtStatus *read_shape(const OrtApi *api, const OrtValue *value, int *type, size_t *rank, int64_t *dims) {
  OrtTensorTypeAndShapeInfo *info;
  TRY(api->GetTensorTypeAndShape(value, &info));
  OrtStatus *status = api->GetTensorElementType(info, type);
  if (!status)
    status = api->GetDimensionsCount(info, rank);
  if (!status && *rank && *rank <= MAX_RANK)
    status = api->GetDimensions(info, dims, *rank);
  api->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

static OrtStatus *check_type(const node_kernel *kernel, uint32_t i, int type, size_t rank) {
  const coda_tensor *expected = &kernel->op->inputs[i];
  if (type == expected->type && rank == expected->rank)
    return NULL;
  return coda_fail(kernel->api, ORT_INVALID_ARGUMENT,
                   "node '%s' (coda::%s): input '%s' has element type %d and %zu dimensions, expected type %d and %u: "
                   "use the model and the library of one build",
                   kernel->name, kernel->op->name, expected->name, type, rank, expected->type, expected->rank);
}

/* Keeps the addresses of constant inputs, which onnxruntime leaves where they are, so that runs need not ask for them. */
static OrtStatus *find_constants(node_kernel *kernel, const OrtKernelInfo *info) {
  const OrtApi *api = kernel->api;
  const coda_operator *op = kernel->op;
  for (uint32_t i = 0; i < op->input_count; i++) {
    const OrtValue *value = NULL;
    int constant = 0, type;
    size_t rank;
    int64_t dims[MAX_RANK];
    void *data;
    TRY(api->KernelInfoGetConstantInput_tensor(info, i, &constant, &value));
    if (!constant || !value)
      continue;
    TRY(read_shape(api, value, &type, &rank, dims));
    TRY(check_type(kernel, i, type, rank));
    bool fixed = true;
    for (uint32_t axis = 0; axis < rank; axis++) {
      const coda_size *size = &op->sizes[op->inputs[i].dims[axis]];
      fixed = fixed && size->op == EXPR_CONST;
      if (size->op == EXPR_CONST && size->a != dims[axis])
        return coda_fail(api, ORT_INVALID_ARGUMENT,
                         "node '%s' (coda::%s): axis %u of constant '%s' is %" PRId64 ", expected %" PRId64
                         ": use the model and the library of one build",
                         kernel->name, op->name, axis, op->inputs[i].name, dims[axis], size->a);
    }
    TRY(api->GetTensorMutableData((OrtValue *)value, &data));
    if (fixed)
      kernel->constants[i] = (uintptr_t)data;
  }
  return NULL;
}

static const coda_weight *find_weight(const char *digest, size_t length) {
  for (const coda_weight *w = CODA_WEIGHTS; w->digest; w++)
    if (strlen(w->digest) == length && memcmp(w->digest, digest, length) == 0)
      return w;
  return NULL;
}

/* Finds what the node's attribute `weights` lists: digests, with blanks between. */
static OrtStatus *find_weights(node_kernel *kernel, const OrtKernelInfo *info) {
  const OrtApi *api = kernel->api;
  const coda_operator *op = kernel->op;
  size_t size = 0;
  TRY(api->KernelInfoGetAttribute_string(info, "weights", NULL, &size));
  char *list = malloc(size + 1);
  kernel->weights = calloc(op->weight_count, sizeof *kernel->weights);
  OrtStatus *status = NULL;
  if (!list || !kernel->weights)
    status = coda_fail(api, ORT_FAIL, "node '%s': no memory for a kernel", kernel->name);
  else
    status = api->KernelInfoGetAttribute_string(info, "weights", list, &size);
  const char *at = list;
  for (uint32_t i = 0; i < op->weight_count && !status; i++) {
    const size_t length = strcspn(at, " ");
    const coda_weight *w = find_weight(at, length);
    if (!w || w->bytes != op->weights[i])
      status = coda_fail(api, ORT_INVALID_ARGUMENT,
                         "node '%s' (coda::%s): the library does not hold its weights '%.*s': use the model and the "
                         "library of one build",
                         kernel->name, op->name, (int)length, at);
    else
      kernel->weights[i] = (uintptr_t)w->data;
    at += length + (at[length] == ' ');
  }
  free(list);
  return status;
}

OrtStatus *coda_kernel_create(const OrtCustomOp *base, const OrtApi *api, const OrtKernelInfo *info, void **result) {
  node_kernel *kernel = calloc(1, sizeof *kernel);
  if (!kernel)
    return coda_fail(api, ORT_FAIL, "no memory for a kernel");
  kernel->api = api;
  kernel->op = ((const coda_custom_op *)base)->op;
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  kernel->cores = cores > 0 ? cores : 1;
  size_t size = sizeof kernel->name;
  OrtStatus *status = api->KernelInfo_GetNodeName(info, kernel->name, &size);
  if (status) { /* a longer name: messages do without it */
    api->ReleaseStatus(status);
    kernel->name[0] = 0;
  }
  status = api->CreateMemoryInfo("Cpu", ORT_ARENA_ALLOCATOR, 0, ORT_MEMORY_DEFAULT, &kernel->memory);
  if (!status)
    status = find_constants(kernel, info);
  if (!status && kernel->op->weight_count)
    status = find_weights(kernel, info);
  if (status) {
    coda_kernel_destroy(kernel);
    return status;
  }
  *result = kernel;
  return NULL;
}

void coda_kernel_destroy(void *state) {
  node_kernel *kernel = state;
  if (kernel->memory)
    kernel->api->ReleaseMemoryInfo(kernel->memory);
  free(kernel->weights);
  free(kernel);
}

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* One run of a node. */
typedef struct {
  const node_kernel *kernel;
  OrtKernelContext *context;
  int64_t dims[MAX_TENSORS][MAX_RANK];
  uint64_t inputs[MAX_TENSORS], outputs[MAX_TENSORS];
  int64_t sizes[MAX_SIZES];
  uint8_t *memory; /* workspaces, then scratch */
  size_t workspace_bytes, scratch_bytes; /* scratch of one slot of the step that needs most */
} node_run;

static OrtStatus *read_input(node_run *run, uint32_t i) {
  const OrtApi *api = run->kernel->api;
  const coda_operator *op = run->kernel->op;
  const coda_tensor *expected = &op->inputs[i];
  const OrtValue *value = NULL;
  int type;
  size_t rank;
  void *data;
  TRY(api->KernelContext_GetInput(run->context, i, &value));
  if (!value)
    return coda_fail(api, ORT_INVALID_ARGUMENT, "node '%s' (coda::%s): input '%s' is missing", run->kernel->name,
                     op->name, expected->name);
  TRY(read_shape(api, value, &type, &rank, run->dims[i]));
  TRY(check_type(run->kernel, i, type, rank));
  TRY(api->GetTensorMutableData((OrtValue *)value, &data));
  run->inputs[i] = (uintptr_t)data;
  return NULL;
}

static OrtStatus *check_sizes(const node_run *run) {
  const coda_operator *op = run->kernel->op;
  for (uint32_t i = 0; i < op->input_count; i++) {
    if (run->kernel->constants[i])
      continue;
    for (uint32_t axis = 0; axis < op->inputs[i].rank; axis++) {
      const int64_t expected = run->sizes[op->inputs[i].dims[axis]];
      if (run->dims[i][axis] != expected)
        return coda_fail(run->kernel->api, ORT_INVALID_ARGUMENT,
                         "node '%s' (coda::%s): axis %u of '%s' is %" PRId64 ", expected %" PRId64
                         " by the other inputs: feed inputs whose shapes agree",
                         run->kernel->name, op->name, axis, op->inputs[i].name, run->dims[i][axis], expected);
    }
  }
  for (uint32_t i = 0; i < op->constraint_count; i++) {
    const coda_constraint *c = &op->constraints[i];
    const int64_t left = run->sizes[c->left], right = run->sizes[c->right];
    if (c->equal ? left != right : left > right)
      return coda_fail(run->kernel->api, ORT_INVALID_ARGUMENT,
                       "the model takes no inputs of these sizes: %s asks for %" PRId64 " %s %" PRId64, c->text, left,
                       c->equal ? "=" : "<=", right);
  }
  return NULL;
}

static OrtStatus *find_sizes(node_run *run) {
  const coda_operator *op = run->kernel->op;
  int64_t symbols[MAX_SIZES];
  for (uint32_t i = 0; i < op->input_count; i++) {
    run->inputs[i] = run->kernel->constants[i];
    if (!run->inputs[i])
      TRY(read_input(run, i));
  }
  for (uint32_t i = 0; i < op->symbol_count; i++)
    symbols[i] = run->dims[op->symbols[i].input][op->symbols[i].axis];
  const uint32_t failed = coda_sizes(op, symbols, NULL, run->sizes, NULL);
  if (failed)
    return coda_fail(
        run->kernel->api, ORT_INVALID_ARGUMENT,
        "node '%s' (coda::%s): size %u cannot be computed for these inputs: feed smaller ones, none of them empty",
        run->kernel->name, op->name, failed - 1);
  return check_sizes(run);
}

static OrtStatus *make_outputs(node_run *run) {
  const OrtApi *api = run->kernel->api;
  const coda_operator *op = run->kernel->op;
  for (uint32_t o = 0; o < op->output_count; o++) {
    int64_t dims[MAX_RANK];
    OrtValue *value = NULL;
    void *data;
    for (uint32_t axis = 0; axis < op->outputs[o].rank; axis++) {
      dims[axis] = run->sizes[op->outputs[o].dims[axis]];
      if (dims[axis] < 0)
        return coda_fail(api, ORT_INVALID_ARGUMENT,
                         "node '%s' (coda::%s): axis %u of output '%s' would be %" PRId64 ": feed longer inputs",
                         run->kernel->name, op->name, axis, op->outputs[o].name, dims[axis]);
    }
    TRY(api->KernelContext_GetOutput(run->context, o, dims, op->outputs[o].rank, &value));
    TRY(api->GetTensorMutableData(value, &data));
    run->outputs[o] = (uintptr_t)data;
  }
  return NULL;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* One step, as its chunks see it. */
typedef struct {
  const coda_step *step;
  uint64_t buffers[MAX_OPERANDS];
  int64_t ints[MAX_INTS];
  int64_t items, units, chunks; /* a unit: `grain` items */
  uint8_t *scratch;
  size_t scratch_bytes;
  _Atomic uint64_t free_slots;
  _Atomic int32_t error;
} step_job;

static uint32_t take_slot(step_job *job) {
  for (;;) {
    uint64_t free_slots = atomic_load_explicit(&job->free_slots, memory_order_relaxed);
    const uint64_t lowest = free_slots & -free_slots;
    if (lowest && atomic_compare_exchange_weak_explicit(&job->free_slots, &free_slots, free_slots & ~lowest,
                                                        memory_order_acquire, memory_order_relaxed))
      return (uint32_t)__builtin_ctzll(lowest);
  }
}

static int32_t call(const step_job *job, coda_function kernel, int64_t begin, int64_t end, uint32_t slot) {
  uint64_t buffers[MAX_OPERANDS + 1];
  int64_t ints[MAX_INTS + 2];
  const uint32_t operands = job->step->operand_count, sizes = job->step->int_count;
  memcpy(buffers, job->buffers, operands * sizeof *buffers);
  memcpy(ints, job->ints, sizes * sizeof *ints);
  buffers[operands] = (uintptr_t)(job->scratch + slot * job->scratch_bytes);
  ints[sizes] = begin;
  ints[sizes + 1] = end;
  return kernel(buffers, ints);
}

static void run_chunk(void *context, size_t chunk) {
  step_job *job = context;
  const int64_t grain = job->step->grain, i = (int64_t)chunk;
  const int64_t begin = job->units * i / job->chunks * grain, limit = job->units * (i + 1) / job->chunks * grain;
  if (atomic_load_explicit(&job->error, memory_order_relaxed))
    return;
  const uint32_t slot = take_slot(job);
  const int32_t result = call(job, job->step->kernel, begin, limit < job->items ? limit : job->items, slot);
  atomic_fetch_or_explicit(&job->free_slots, 1ull << slot, memory_order_release);
  if (result)
    atomic_store_explicit(&job->error, result, memory_order_relaxed);
}

static uint64_t address(const node_run *run, const coda_operand *operand) {
  const coda_operator *op = run->kernel->op;
  size_t offset = 0;
  switch (operand->origin) {
  case FROM_INPUT: return run->inputs[operand->index];
  case FROM_OUTPUT: return run->outputs[operand->index];
  case FROM_CONSTANT: return (uintptr_t)op->constants[operand->index];
  case FROM_WEIGHT: return run->kernel->weights[operand->index];
  default:
    for (uint32_t i = 0; i < operand->index; i++)
      offset += padded((size_t)run->sizes[op->workspaces[i]]);
    return (uintptr_t)(run->memory + offset);
  }
}

static int64_t chunks_of(const node_run *run, const coda_step *step) {
  const int64_t items = run->sizes[step->items], most = CHUNKS_PER_CORE * run->kernel->cores;
  const int64_t units = items <= 0 ? 0 : (items - 1) / step->grain + 1;
  return units < most ? units : most;
}

static OrtStatus *run_step(const node_run *run, const coda_step *step) {
  const node_kernel *kernel = run->kernel;
  step_job job = {.step = step, .items = run->sizes[step->items]};
  job.chunks = chunks_of(run, step);
  if (job.chunks == 0)
    return NULL;
  job.units = (job.items - 1) / step->grain + 1;
  for (uint32_t i = 0; i < step->operand_count; i++)
    job.buffers[i] = address(run, &step->operands[i]);
  for (uint32_t i = 0; i < step->int_count; i++)
    job.ints[i] = run->sizes[step->ints[i]];
  job.scratch = run->memory + run->workspace_bytes;
  job.scratch_bytes = run->scratch_bytes;
  atomic_init(&job.free_slots, job.chunks < MAX_SLOTS ? (1ull << job.chunks) - 1 : UINT64_MAX);
  atomic_init(&job.error, 0);
  if (job.chunks == 1)
    run_chunk(&job, 0);
  else
    TRY(kernel->api->KernelContext_ParallelFor(run->context, run_chunk, (size_t)job.chunks, 0, &job));
  int32_t result = atomic_load_explicit(&job.error, memory_order_relaxed);
  if (!result && step->finish)
    result = call(&job, step->finish, 0, job.items, 0);
  if (result == ERROR_INDEX)
    return coda_fail(kernel->api, ORT_INVALID_ARGUMENT, "node '%s' (coda::%s): an index is out of range in '%s'",
                     kernel->name, kernel->op->name, step->name);
  if (result)
    return coda_fail(kernel->api, ORT_FAIL, "node '%s' (coda::%s): kernel error %" PRId32 " in '%s'", kernel->name,
                     kernel->op->name, result, step->name);
  return NULL;
}

/* Bytes of working memory; false if that is no size. */
static bool measure(node_run *run, size_t *bytes) {
  const coda_operator *op = run->kernel->op;
  int64_t total = 0, scratch = 0, slots = 0, all;
  for (uint32_t i = 0; i < op->workspace_count; i++) {
    const int64_t size = run->sizes[op->workspaces[i]];
    if (size < 0 || __builtin_add_overflow(total, (int64_t)padded((size_t)size), &total))
      return false;
  }
  for (uint32_t i = 0; i < op->step_count; i++) {
    const int64_t size = run->sizes[op->steps[i].scratch], chunks = chunks_of(run, &op->steps[i]);
    scratch = size > scratch ? size : scratch;
    slots = chunks > slots ? chunks : slots;
  }
  slots = slots < MAX_SLOTS ? slots : MAX_SLOTS;
  run->workspace_bytes = (size_t)total;
  run->scratch_bytes = padded((size_t)scratch);
  if (__builtin_mul_overflow((int64_t)run->scratch_bytes, slots, &all) || __builtin_add_overflow(total, all, &total))
    return false;
  *bytes = (size_t)total;
  return true;
}

static OrtStatus *run_steps(node_run *run) {
  const OrtApi *api = run->kernel->api;
  const coda_operator *op = run->kernel->op;
  OrtAllocator *allocator = NULL;
  void *memory = NULL;
  size_t bytes;
  if (!measure(run, &bytes))
    return coda_fail(api, ORT_INVALID_ARGUMENT,
                     "node '%s' (coda::%s): needs more working memory than there is: feed smaller inputs",
                     run->kernel->name, op->name);
  if (bytes) {
    TRY(api->KernelContext_GetAllocator(run->context, run->kernel->memory, &allocator));
    memory = allocator->Alloc(allocator, bytes + ALIGNMENT);
    if (!memory) {
      api->ReleaseAllocator(allocator);
      return coda_fail(api, ORT_FAIL, "node '%s' (coda::%s): no memory for %zu bytes", run->kernel->name, op->name,
                       bytes);
    }
    run->memory = (uint8_t *)memory + (ALIGNMENT - (uintptr_t)memory % ALIGNMENT) % ALIGNMENT;
  }
  OrtStatus *status = NULL;
  for (uint32_t i = 0; i < op->step_count && !status; i++)
    status = run_step(run, &op->steps[i]);
  if (memory) {
    allocator->Free(allocator, memory);
    api->ReleaseAllocator(allocator);
  }
  return status;
}

OrtStatus *coda_kernel_compute(void *state, OrtKernelContext *context) {
  const node_kernel *kernel = state;
  node_run run;
  size_t count;
  run.kernel = kernel;
  run.context = context;
  run.memory = NULL;
  TRY(kernel->api->KernelContext_GetInputCount(context, &count));
  if (count != kernel->op->input_count)
    return coda_fail(kernel->api, ORT_INVALID_ARGUMENT,
                     "node '%s' (coda::%s) has %zu inputs, expected %u: use the model and the library of one build",
                     kernel->name, kernel->op->name, count, kernel->op->input_count);
  TRY(find_sizes(&run));
  TRY(make_outputs(&run));
  return run_steps(&run);
}
