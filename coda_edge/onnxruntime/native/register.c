/* The library's one export: gives onnxruntime the operators of the model. */
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "cpu.h" /* the runtime's */
#include "operators.h"

enum { MAX_MESSAGE = 512 };

static const OrtApi *api;
static OrtCustomOpDomain *domain; /* made once, shared by all sessions of the process */
static atomic_flag lock = ATOMIC_FLAG_INIT;

OrtStatus *coda_fail(const OrtApi *from, int code, const char *format, ...) {
  char message[MAX_MESSAGE];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return from->CreateStatus(code, message);
}

static const coda_operator *of(const OrtCustomOp *base) { return ((const coda_custom_op *)base)->op; }

static const char *name(const OrtCustomOp *base) { return of(base)->name; }
static const char *provider(const OrtCustomOp *base) { return (void)base, "CPUExecutionProvider"; }
static int input_type(const OrtCustomOp *base, size_t i) { return of(base)->inputs[i].type; }
static int output_type(const OrtCustomOp *base, size_t i) { return of(base)->outputs[i].type; }
static size_t inputs(const OrtCustomOp *base) { return of(base)->input_count; }
static size_t outputs(const OrtCustomOp *base) { return of(base)->output_count; }
static int required(const OrtCustomOp *base, size_t i) { return (void)base, (void)i, ORT_REQUIRED; }
static int memory(const OrtCustomOp *base, size_t i) { return (void)base, (void)i, ORT_MEMORY_DEFAULT; }
static int one(const OrtCustomOp *base) { return (void)base, 1; }
static int last_version(const OrtCustomOp *base) { return (void)base, INT32_MAX; }
static OrtStatus *infer(const OrtCustomOp *base, OrtShapeInferContext *context) {
  return coda_infer_shapes(api, of(base), context);
}

static const OrtCustomOp OPERATOR = {
    .version = ORT_API_USED,
    .GetName = name,
    .GetExecutionProviderType = provider,
    .GetInputType = input_type,
    .GetInputTypeCount = inputs,
    .GetOutputType = output_type,
    .GetOutputTypeCount = outputs,
    .KernelDestroy = coda_kernel_destroy,
    .GetInputCharacteristic = required,
    .GetOutputCharacteristic = required,
    .GetInputMemoryType = memory,
    .GetVariadicInputMinArity = one,
    .GetVariadicInputHomogeneity = one,
    .GetVariadicOutputMinArity = one,
    .GetVariadicOutputHomogeneity = one,
    .CreateKernelV2 = coda_kernel_create,
    .KernelComputeV2 = coda_kernel_compute,
    .InferOutputShapeFn = infer,
    .GetStartVersion = one,
    .GetEndVersion = last_version,
};

static OrtStatus *make_domain(void) {
  TRY(api->CreateCustomOpDomain("coda", &domain));
  OrtStatus *status = NULL;
  for (uint32_t i = 0; i < CODA_OPERATOR_COUNT && !status; i++) {
    CODA_CUSTOM_OPS[i] = (coda_custom_op){OPERATOR, &CODA_OPERATORS[i]};
    status = api->CustomOpDomain_Add(domain, &CODA_CUSTOM_OPS[i].base);
  }
  if (status) {
    api->ReleaseCustomOpDomain(domain);
    domain = NULL;
  }
  return status;
}

/* The first feature that this CPU lacks, or NULL. */
static const char *missing_feature(void) {
  for (const char *const *name = CODA_FEATURES; *name; name++)
    if (!coda_cpu_has(*name))
      return *name;
  return NULL;
}

__attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtSessionOptions *options,
                                                                    const OrtApiBase *base) {
  const OrtApi *found = base->GetApi(ORT_API_USED);
  if (!found) {
    const OrtApi *first = base->GetApi(1);
    return first ? coda_fail(first, ORT_FAIL,
                             "onnxruntime %s is too old for this library: install 1.18 or later, or leave the library "
                             "out, and the model runs by its functions",
                             base->GetVersionString())
                 : NULL;
  }
  const char *missing = missing_feature();
  if (missing)
    return coda_fail(found, ORT_FAIL,
                     "this library's kernels need the CPU feature %s, which this CPU lacks: package the model for "
                     "another target, or leave the library out, and the model runs by its functions",
                     missing);
  while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
    ;
  api = found;
  OrtStatus *status = domain ? NULL : make_domain();
  atomic_flag_clear_explicit(&lock, memory_order_release);
  return status ? status : api->AddCustomOpDomain(options, domain);
}
