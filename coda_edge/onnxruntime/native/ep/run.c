/* Runs a model for onnxruntime: inputs and outputs are its tensors in place, threads are those of its intra-op pool.
 *
 * onnxruntime may run a session from many threads at a time; a session of ours serves one. So a runner has as many as
 * were ever needed at once. */
#include <stdlib.h>
#include <string.h>

#include "provider.h"

static OrtStatus *borrow_session(runner *r, coda_session **session) {
  const OrtApi *ort = r->ort;
  *session = NULL;
  bool room = true;
  pthread_mutex_lock(&r->mutex);
  if (r->idle_count) {
    *session = r->idle[--r->idle_count];
  } else if (r->session_count == r->capacity) { /* there will be a place for each to return to */
    const size_t capacity = 2 * r->capacity + 1;
    coda_session **grown = realloc(r->idle, capacity * sizeof *grown);
    room = grown != NULL;
    if (room) {
      r->idle = grown;
      r->capacity = capacity;
    }
  }
  r->session_count += !*session && room;
  pthread_mutex_unlock(&r->mutex);
  if (*session)
    return NULL;
  if (!room)
    return status_new(ort, ORT_FAIL, "no memory for another session");
  coda_error error;
  const coda_session_options options = {.size = sizeof options, .spin_us = -1, .lent = 1};
  if (coda_session_create(r->model, &options, session, &error) == CODA_OK)
    return NULL;
  pthread_mutex_lock(&r->mutex);
  r->session_count--;
  pthread_mutex_unlock(&r->mutex);
  return status_of(ort, &error);
}

static void return_session(runner *r, coda_session *session) {
  pthread_mutex_lock(&r->mutex);
  r->idle[r->idle_count++] = session;
  pthread_mutex_unlock(&r->mutex);
}

/* onnxruntime has made sure that a tensor's size is one. */
static size_t bytes_of(const coda_tensor *t) {
  size_t bytes = coda_dtype_size(t->dtype);
  for (int32_t axis = 0; axis < t->rank; axis++)
    bytes *= (size_t)t->dims[axis];
  return bytes;
}

static OrtStatus *read_inputs(const runner *r, OrtKernelContext *context, coda_tensor *inputs) {
  const OrtApi *ort = r->ort;
  for (size_t i = 0; i < r->input_count; i++) {
    const OrtValue *value = NULL;
    OrtTensorTypeAndShapeInfo *type;
    coda_tensor *t = &inputs[r->inputs[i]];
    const char *name = coda_model_input(r->model, (size_t)r->inputs[i])->name;
    size_t rank = 0;
    TRY(ort->KernelContext_GetInput(context, r->first_input + i, &value));
    if (!value)
      return status_new(ort, ORT_INVALID_ARGUMENT, "'%s' is missing: it is an input of what the bundle computes", name);
    TRY(ort->GetTensorTypeAndShape(value, &type));
    OrtStatus *status = ort->GetTensorElementType(type, &t->dtype);
    if (!status)
      status = ort->GetDimensionsCount(type, &rank);
    if (!status && rank > CODA_MAX_RANK)
      status = status_new(ort, ORT_INVALID_ARGUMENT,
                          "'%s' has %zu dimensions, expected at most %d", name, rank, CODA_MAX_RANK);
    if (!status)
      status = ort->GetDimensions(type, t->dims, rank);
    ort->ReleaseTensorTypeAndShapeInfo(type);
    TRY(status);
    t->rank = (int32_t)rank;
    t->bytes = bytes_of(t);
    TRY(ort->GetTensorMutableData((OrtValue *)value, &t->data)); /* only read */
  }
  return NULL;
}

/* Asks onnxruntime for memory of the outputs whose sizes are known. */
static OrtStatus *place_outputs(const runner *r, OrtKernelContext *context, coda_tensor *outputs, bool *late) {
  const OrtApi *ort = r->ort;
  for (size_t i = 0; i < r->output_count; i++) {
    coda_tensor *t = &outputs[r->outputs[i]];
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
static OrtStatus *copy_late_outputs(const runner *r, OrtKernelContext *context, const coda_tensor *outputs,
                                    const bool *late) {
  const OrtApi *ort = r->ort;
  for (size_t i = 0; i < r->output_count; i++) {
    if (!late[i])
      continue;
    const coda_tensor *t = &outputs[r->outputs[i]];
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

/* A failure of a run. */
static OrtStatus *run_status(const runner *r, const coda_error *error) {
  if (error->code == CODA_ERROR_BUNDLE)
    return status_new(r->ort, ORT_FAIL, "%s: put the file in its place again as it was made, or make it again",
                      error->message);
  return status_of(r->ort, error);
}

static OrtStatus *run(runner *r, coda_session *session, OrtKernelContext *context, coda_tensor *inputs,
                      coda_tensor *outputs, bool *late) {
  lender l = {r->ort, context};
  coda_error error;
  TRY(read_inputs(r, context, inputs));
  if (coda_session_shapes(session, inputs, outputs, &error))
    return run_status(r, &error);
  TRY(place_outputs(r, context, outputs, late));
  if (coda_session_run_on(session, inputs, outputs, lend, &l, &error))
    return run_status(r, &error);
  return copy_late_outputs(r, context, outputs, late);
}

void runner_init(runner *r, const OrtApi *ort, coda_model *model) {
  *r = (runner){.ort = ort, .model = model};
  pthread_mutex_init(&r->mutex, NULL);
}

OrtStatus *runner_run(runner *r, OrtKernelContext *context) {
  const size_t inputs = coda_model_input_count(r->model), outputs = coda_model_output_count(r->model);
  coda_tensor *tensors = calloc(inputs + outputs + 1, sizeof *tensors);
  bool *late = calloc(r->output_count + 1, sizeof *late);
  coda_session *session = NULL;
  OrtStatus *status = tensors && late ? borrow_session(r, &session)
                                      : status_new(r->ort, ORT_FAIL, "no memory for the tensors of a run");
  if (session) {
    status = run(r, session, context, tensors, tensors + inputs, late);
    return_session(r, session);
  }
  free(tensors);
  free(late);
  return status;
}

void runner_free(runner *r) {
  for (size_t i = 0; i < r->idle_count; i++)
    coda_session_free(r->idle[i]);
  free(r->idle);
  free(r->inputs);
  free(r->outputs);
  pthread_mutex_destroy(&r->mutex);
}
