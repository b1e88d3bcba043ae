/* What runs a fused node: the node's values by the bundle's numbers, and a runner. */
#include <malloc.h>
#include <stdlib.h>

#include "provider.h"

typedef struct {
  OrtNodeComputeInfo base;
  const host *api;
  runner runner;
} node;

static OrtStatus *compute(OrtNodeComputeInfo *info, void *state, OrtKernelContext *context) {
  (void)info;
  return runner_run(&((node *)state)->runner, context);
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
  for (size_t i = 0; i < coda_model_input_count(n->runner.model); i++) {
    bool given = false;
    for (size_t k = 0; k < n->runner.input_count; k++)
      given |= n->runner.inputs[k] == (int)i;
    if (!given)
      return status_new(n->api->ort, ORT_EP_FAIL,
                        "the bundle reads '%s', which the model's node does not have: compile it from this model again",
                        coda_model_input(n->runner.model, i)->name);
  }
  return NULL;
}

static OrtStatus *bind(node *n, const OrtNode *fused, const bundle *b) {
  values inputs = {NULL, 0}, outputs = {NULL, 0};
  OrtStatus *status = node_inputs(n->api, fused, &inputs);
  if (!status)
    status = node_outputs(n->api, fused, &outputs);
  if (!status)
    status = number_values(n->api, &inputs, b, bundle_input, "input", &n->runner.inputs);
  if (!status)
    status = number_values(n->api, &outputs, b, bundle_output, "output", &n->runner.outputs);
  n->runner.input_count = inputs.count;
  n->runner.output_count = outputs.count;
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
  runner_init(&n->runner, p->api.ort, b->model);
  OrtStatus *status = bind(n, fused, b);
  if (status)
    compute_free(&n->base);
  else
    *result = &n->base;
  return status;
}

void compute_free(OrtNodeComputeInfo *info) {
  node *n = (node *)info;
  runner_free(&n->runner);
  free(n);
}
