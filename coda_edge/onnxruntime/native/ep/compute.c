/* Runs a fused node: inputs and outputs are onnxruntime's tensors in place, threads are those of its intra-op pool.
 *
 * onnxruntime may run a session from many threads at a time; a session of ours serves one. So a node has as many as
 * were ever needed at once. */
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

typedef struct {
  OrtNodeComputeInfo base;
  const host *api;
  coda_model *model;
  size_t input_count, output_count; /* of the fused node */
  int *inputs, *outputs; /* by number in the fused node, that in the bundle */
  pthread_mutex_t mutex;
  coda_session **idle;
  size_t idle_count, session_count, capacity;
} node;

static OrtStatus *borrow_session(node *n, coda_session **session) {
  const OrtApi *ort = n->api->ort;
  *session = NULL;
  bool room = true;
  pthread_mutex_lock(&n->mutex);
  if (n->idle_count) {
    *session = n->idle[--n->idle_count];
  } else if (n->session_count == n->capacity) { /* there will be a place for each to return to */
    const size_t capacity = 2 * n->capacity + 1;
    coda_session **grown = realloc(n->idle, capacity * sizeof *grown);
    room = grown != NULL;
    if (room) {
      n->idle = grown;
      n->capacity = capacity;
    }
  }
  n->session_count += !*session && room;
  pthread_mutex_unlock(&n->mutex);
  if (*session)
    return NULL;
  if (!room)
    return status_new(ort, ORT_FAIL, "no memory for another session");
  coda_error error;
  const coda_session_options options = {.size = sizeof options, .spin_us = -1, .lent = 1};
  if (coda_session_create(n->model, &options, session, &error) == CODA_OK)
    return NULL;
  pthread_mutex_lock(&n->mutex);
  n->session_count--;
  pthread_mutex_unlock(&n->mutex);
  return status_of(ort, &error);
}

static void return_session(node *n, coda_session *session) {
  pthread_mutex_lock(&n->mutex);
  n->idle[n->idle_count++] = session;
  pthread_mutex_unlock(&n->mutex);
}

static OrtStatus *read_inputs(const node *n, OrtKernelContext *context, coda_tensor *inputs) {
  const OrtApi *ort = n->api->ort;
  for (size_t i = 0; i < n->input_count; i++) {
    const OrtValue *value = NULL;
    OrtTensorTypeAndShapeInfo *type;
    coda_tensor *t = &inputs[n->inputs[i]];
    size_t rank = 0;
    TRY(ort->KernelContext_GetInput(context, i, &value));
    if (!value)
      return status_new(ort, ORT_INVALID_ARGUMENT, "input %zu of a fused node is missing", i);
    TRY(ort->GetTensorTypeAndShape(value, &type));
    OrtStatus *status = ort->GetTensorElementType(type, &t->dtype);
    if (!status)
      status = ort->GetDimensionsCount(type, &rank);
    if (!status && rank > CODA_MAX_RANK)
      status = status_new(ort, ORT_INVALID_ARGUMENT,
                          "input %zu of a fused node has %zu dimensions, expected at most %d", i, rank, CODA_MAX_RANK);
    if (!status)
      status = ort->GetDimensions(type, t->dims, rank);
    ort->ReleaseTensorTypeAndShapeInfo(type);
    TRY(status);
    t->rank = (int32_t)rank;
    TRY(ort->GetTensorSizeInBytes(value, &t->bytes));
    TRY(ort->GetTensorMutableData((OrtValue *)value, &t->data)); /* only read */
  }
  return NULL;
}

/* Asks onnxruntime for memory of the outputs whose sizes are known. */
static OrtStatus *place_outputs(const node *n, OrtKernelContext *context, coda_tensor *outputs, bool *late) {
  const OrtApi *ort = n->api->ort;
  for (size_t i = 0; i < n->output_count; i++) {
    coda_tensor *t = &outputs[n->outputs[i]];
    for (int32_t axis = 0; axis < t->rank; axis++)
      late[i] |= t->dims[axis] < 0;
    if (late[i])
      continue;
    OrtValue *value;
    TRY(ort->KernelContext_GetOutput(context, i, t->dims, (size_t)t->rank, &value));
    TRY(ort->GetTensorMutableData(value, &t->data));
  }
  return NULL;
}

/* Copies the outputs whose sizes only the run could tell. */
static OrtStatus *copy_late_outputs(const node *n, OrtKernelContext *context, const coda_tensor *outputs,
                                    const bool *late) {
  const OrtApi *ort = n->api->ort;
  for (size_t i = 0; i < n->output_count; i++) {
    if (!late[i])
      continue;
    const coda_tensor *t = &outputs[n->outputs[i]];
    OrtValue *value;
    void *data;
    TRY(ort->KernelContext_GetOutput(context, i, t->dims, (size_t)t->rank, &value));
    TRY(ort->GetTensorMutableData(value, &data));
    if (t->bytes)
      memcpy(data, t->data, t->bytes);
  }
  return NULL;
}

typedef struct {
  const OrtApi *ort;
  OrtKernelContext *context;
} lender;

static void lend(void *context, void (*work)(void *, size_t), size_t count, void *argument) {
  const lender *l = context;
  OrtStatus *status = l->ort->KernelContext_ParallelFor(l->context, work, count, 0, argument);
  if (status) /* then the calling thread does it all */
    l->ort->ReleaseStatus(status);
}

static OrtStatus *run(node *n, coda_session *session, OrtKernelContext *context, coda_tensor *inputs,
                      coda_tensor *outputs, bool *late) {
  lender l = {n->api->ort, context};
  coda_error error;
  TRY(read_inputs(n, context, inputs));
  if (coda_session_shapes(session, inputs, outputs, &error))
    return status_of(n->api->ort, &error);
  TRY(place_outputs(n, context, outputs, late));
  if (coda_session_run_on(session, inputs, outputs, lend, &l, &error))
    return status_of(n->api->ort, &error);
  return copy_late_outputs(n, context, outputs, late);
}

static OrtStatus *compute(OrtNodeComputeInfo *info, void *state, OrtKernelContext *context) {
  (void)info;
  node *n = state;
  const size_t inputs = coda_model_input_count(n->model), outputs = coda_model_output_count(n->model);
  coda_tensor *tensors = calloc(inputs + outputs + 1, sizeof *tensors);
  bool *late = calloc(n->output_count + 1, sizeof *late);
  coda_session *session = NULL;
  OrtStatus *status = tensors && late ? borrow_session(n, &session)
                                      : status_new(n->api->ort, ORT_FAIL, "no memory for the tensors of a run");
  if (session) {
    status = run(n, session, context, tensors, tensors + inputs, late);
    return_session(n, session);
  }
  free(tensors);
  free(late);
  return status;
}

static OrtStatus *create_state(OrtNodeComputeInfo *info, OrtNodeComputeContext *context, void **state) {
  (void)context;
#ifdef __GLIBC__
  malloc_trim(0); /* onnxruntime has just freed the weights that the bundle has, into a heap full of holes */
#endif
  *state = info;
  return NULL;
}

static void release_state(OrtNodeComputeInfo *info, void *state) { (void)info, (void)state; }

typedef int (*find_function)(const bundle *, const char *);

/* The bundle's number of each value; one that the bundle does not have is an error. */
static OrtStatus *number_values(const host *api, const values *list, const bundle *b, find_function find,
                                const char *what, int **numbers) {
  *numbers = calloc(list->count + 1, sizeof **numbers);
  if (!*numbers)
    return status_new(api->ort, ORT_FAIL, "no memory for a fused node");
  for (size_t i = 0; i < list->count; i++) {
    const char *name;
    TRY(value_name(api, list->items[i], &name));
    (*numbers)[i] = find(b, name);
    if ((*numbers)[i] < 0)
      return status_new(api->ort, ORT_EP_FAIL,
                        "the bundle has no %s '%s', which the model's node has: compile it from this model again", what,
                        name);
  }
  return NULL;
}

/* Every input of the bundle must come from the node. */
static OrtStatus *check_inputs(const node *n) {
  for (size_t i = 0; i < coda_model_input_count(n->model); i++) {
    bool given = false;
    for (size_t k = 0; k < n->input_count; k++)
      given |= n->inputs[k] == (int)i;
    if (!given)
      return status_new(n->api->ort, ORT_EP_FAIL,
                        "the bundle reads '%s', which the model's node does not have: compile it from this model again",
                        coda_model_input(n->model, i)->name);
  }
  return NULL;
}

static OrtStatus *bind(node *n, const OrtNode *fused, const bundle *b) {
  values inputs = {NULL, 0}, outputs = {NULL, 0};
  OrtStatus *status = node_inputs(n->api, fused, &inputs);
  if (!status)
    status = node_outputs(n->api, fused, &outputs);
  if (!status)
    status = number_values(n->api, &inputs, b, bundle_input, "input", &n->inputs);
  if (!status)
    status = number_values(n->api, &outputs, b, bundle_output, "output", &n->outputs);
  n->input_count = inputs.count;
  n->output_count = outputs.count;
  free(inputs.items);
  free(outputs.items);
  return status ? status : check_inputs(n);
}

OrtStatus *compute_create(const provider *p, const OrtNode *fused, const bundle *b, OrtNodeComputeInfo **result) {
  node *n = calloc(1, sizeof *n);
  if (!n)
    return status_new(p->api.ort, ORT_FAIL, "no memory for a fused node");
  n->base = (OrtNodeComputeInfo){EP_API_USED, create_state, compute, release_state};
  n->api = &p->api;
  n->model = b->model;
  pthread_mutex_init(&n->mutex, NULL);
  OrtStatus *status = bind(n, fused, b);
  if (status)
    compute_free(&n->base);
  else
    *result = &n->base;
  return status;
}

void compute_free(OrtNodeComputeInfo *info) {
  node *n = (node *)info;
  for (size_t i = 0; i < n->idle_count; i++)
    coda_session_free(n->idle[i]);
  free(n->idle);
  free(n->inputs);
  free(n->outputs);
  pthread_mutex_destroy(&n->mutex);
  free(n);
}
