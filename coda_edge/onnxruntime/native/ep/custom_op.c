/* The operators `Region0`, `Region1`, … of the domain `coda.bundle`: each runs the bundle that is its first input.
 * Those behind it are the bundle's inputs, in its order; then come constants that only the operator's function body
 * reads.
 *
 * A bundle is a constant of the model, as onnxruntime tells an operator nothing else about where it is from: it is a
 * file beside the model, found and mapped by onnxruntime, or bytes in it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

#define EXPORT __attribute__((visibility("default")))

/* An operator's name is that of its function too, so that each region of a model needs one. The domain is not that of
 * per-model libraries, as a session has one library for each. */
enum { OPERATORS = 64, NAME_BYTES = 12, NODE_NAME_BYTES = 128, ALIGNMENT = 64 };

typedef struct {
  OrtCustomOp base;
  char name[NAME_BYTES];
} operator_entry;

typedef struct {
  runner runner;
  char name[NODE_NAME_BYTES];
  void *copy; /* of a bundle that is not aligned */
} region_kernel;

static operator_entry operators[OPERATORS];
static OrtCustomOpDomain *domain; /* made once, shared by all sessions of the process */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* --- a kernel ----------------------------------------------------------------------------------------------------- */

static OrtStatus *explain(const region_kernel *k, const OrtApi *ort, const char *what) {
  return status_new(ort, ORT_FAIL,
                    "node '%s': its bundle cannot be used: %s. Package the model again (coda-edge package MODEL --form "
                    "ort-bundle), or leave the library out, and the model runs by its functions",
                    k->name, what);
}

/* Opens the bundle where onnxruntime has it. */
static OrtStatus *open_bundle(region_kernel *k, const OrtApi *ort, const OrtKernelInfo *info, coda_model **model) {
  const OrtValue *value = NULL;
  OrtTensorTypeAndShapeInfo *type;
  int constant = 0, dtype;
  size_t rank, size;
  int64_t bytes = 0;
  void *data;
  TRY(ort->KernelInfoGetConstantInput_tensor(info, 0, &constant, &value));
  if (!constant || !value)
    return explain(k, ort, "it is no constant of the model");
  TRY(ort->GetTensorTypeAndShape(value, &type));
  OrtStatus *status = ort->GetTensorElementType(type, &dtype);
  if (!status)
    status = ort->GetDimensionsCount(type, &rank);
  if (!status && rank == 1)
    status = ort->GetDimensions(type, &bytes, 1);
  ort->ReleaseTensorTypeAndShapeInfo(type);
  TRY(status);
  if (dtype != CODA_UINT8 || rank != 1 || bytes <= 0)
    return explain(k, ort, "it is not the bytes of one");
  TRY(ort->GetTensorMutableData((OrtValue *)value, &data)); /* only read */
  size = (size_t)bytes;
  if ((uintptr_t)data % ALIGNMENT) {
    k->copy = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!k->copy)
      return explain(k, ort, "there is no memory for it");
    data = memcpy(k->copy, data, size);
  }
  coda_error error;
  return coda_model_open_memory(data, size, NULL, model, &error) ? explain(k, ort, error.message) : NULL;
}

/* Numbers 0, 1, … */
static int *numbers(size_t count) {
  int *list = calloc(count + 1, sizeof *list);
  for (size_t i = 0; list && i < count; i++)
    list[i] = (int)i;
  return list;
}

static void destroy(void *state) {
  region_kernel *k = state;
  coda_model *model = k->runner.model;
  runner_free(&k->runner);
  coda_model_free(model);
  free(k->copy);
  free(k);
}

static OrtStatus *create(const OrtCustomOp *base, const OrtApi *ort, const OrtKernelInfo *info, void **result) {
  (void)base;
  region_kernel *k = calloc(1, sizeof *k);
  if (!k)
    return status_new(ort, ORT_FAIL, "no memory for a kernel");
  size_t name_size = sizeof k->name;
  OrtStatus *status = ort->KernelInfo_GetNodeName(info, k->name, &name_size);
  if (status) { /* a longer name: messages do without it */
    ort->ReleaseStatus(status);
    k->name[0] = 0;
  }
  coda_model *model = NULL;
  status = open_bundle(k, ort, info, &model);
  runner_init(&k->runner, ort, model);
  if (!status) {
    runner *r = &k->runner;
    r->first_input = 1;
    r->input_count = coda_model_input_count(model);
    r->output_count = coda_model_output_count(model);
    r->inputs = numbers(r->input_count);
    r->outputs = numbers(r->output_count);
    if (!r->inputs || !r->outputs)
      status = status_new(ort, ORT_FAIL, "no memory for a kernel");
  }
  if (status)
    destroy(k);
  else
    *result = k;
  return status;
}

static OrtStatus *compute(void *state, OrtKernelContext *context) {
  region_kernel *k = state;
  const OrtApi *ort = k->runner.ort;
  size_t inputs, outputs;
  TRY(ort->KernelContext_GetInputCount(context, &inputs));
  TRY(ort->KernelContext_GetOutputCount(context, &outputs));
  if (inputs < 1 + k->runner.input_count || outputs != k->runner.output_count)
    return status_new(ort, ORT_INVALID_ARGUMENT,
                      "node '%s' has %zu inputs and %zu outputs, its bundle %zu and %zu: use the model and the bundle "
                      "of one build",
                      k->name, inputs - 1, outputs, k->runner.input_count, k->runner.output_count);
  return runner_run(&k->runner, context);
}

/* --- the operators ------------------------------------------------------------------------------------------------ */

static const char *get_name(const OrtCustomOp *base) { return ((const operator_entry *)base)->name; }
static const char *get_provider(const OrtCustomOp *base) { return (void)base, "CPUExecutionProvider"; }
static int any_type(const OrtCustomOp *base, size_t i) { return (void)base, (void)i, ORT_TYPE_UNDEFINED; }
static size_t one(const OrtCustomOp *base) { return (void)base, 1; }
static int variadic(const OrtCustomOp *base, size_t i) { return (void)base, (void)i, ORT_VARIADIC; }
static int default_memory(const OrtCustomOp *base, size_t i) { return (void)base, (void)i, ORT_MEMORY_DEFAULT; }
static int at_least_one(const OrtCustomOp *base) { return (void)base, 1; }
static int of_any_types(const OrtCustomOp *base) { return (void)base, 0; }
static int first_version(const OrtCustomOp *base) { return (void)base, 1; }
static int last_version(const OrtCustomOp *base) { return (void)base, INT32_MAX; }

static const OrtCustomOp OPERATOR = {
    .version = OP_API_USED,
    .GetName = get_name,
    .GetExecutionProviderType = get_provider,
    .GetInputType = any_type,
    .GetInputTypeCount = one,
    .GetOutputType = any_type,
    .GetOutputTypeCount = one,
    .KernelDestroy = destroy,
    .GetInputCharacteristic = variadic,
    .GetOutputCharacteristic = variadic,
    .GetInputMemoryType = default_memory,
    .GetVariadicInputMinArity = at_least_one,
    .GetVariadicInputHomogeneity = of_any_types,
    .GetVariadicOutputMinArity = at_least_one,
    .GetVariadicOutputHomogeneity = of_any_types,
    .CreateKernelV2 = create,
    .KernelComputeV2 = compute,
    .GetStartVersion = first_version,
    .GetEndVersion = last_version,
};

static OrtStatus *make_domain(const OrtApi *ort) {
  OrtCustomOpDomain *made;
  TRY(ort->CreateCustomOpDomain("coda.bundle", &made));
  OrtStatus *status = NULL;
  for (size_t i = 0; i < OPERATORS && !status; i++) {
    operators[i].base = OPERATOR;
    snprintf(operators[i].name, NAME_BYTES, "Region%zu", i);
    status = ort->CustomOpDomain_Add(made, &operators[i].base);
  }
  if (status)
    ort->ReleaseCustomOpDomain(made);
  else
    domain = made;
  return status;
}

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  const OrtApi *ort = base->GetApi(OP_API_USED);
  if (!ort) {
    const OrtApi *first = base->GetApi(1);
    return first ? status_new(first, ORT_FAIL,
                              "onnxruntime %s is too old for this library: install 1.18 or later, or leave the library "
                              "out, and the model runs by its functions",
                              base->GetVersionString())
                 : NULL;
  }
  pthread_mutex_lock(&mutex);
  OrtStatus *status = domain ? NULL : make_domain(ort);
  pthread_mutex_unlock(&mutex);
  return status ? status : ort->AddCustomOpDomain(options, domain);
}
