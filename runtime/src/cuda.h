/* Levels for NVIDIA GPUs: kernels are a fat binary that the driver loads, steps' last ints say how each is started. The
 * driver is opened when such a level is; nothing here needs it, or a GPU, before. */
#ifndef CODA_CUDA_H
#define CODA_CUDA_H

#include "error.h"
#include "model.h"

/* The feature that the target of such a level names. */
#define CODA_CUDA_FEATURE "cuda"

typedef struct coda_cuda coda_cuda;

#ifndef CODA_CUDA
#define CODA_CUDA 1
#endif

#if CODA_CUDA
/* Opens GPU number `device` and loads the kernels there. CODA_ERROR_TARGET says what this machine lacks. */
coda_code coda_cuda_open(const coda_section *library, int32_t device, const coda_allocator *allocator,
                         coda_cuda **result, coda_error *error);

/* Finds the plan's kernels and uploads its constants; the model runs on the GPU from then on. */
coda_code coda_cuda_load(coda_cuda *cuda, coda_model *model, coda_error *error);

void coda_cuda_close(coda_cuda *cuda, const coda_allocator *allocator);
#else
static inline coda_code coda_cuda_open(const coda_section *library, int32_t device, const coda_allocator *allocator,
                                       coda_cuda **result, coda_error *error) {
  (void)library, (void)device, (void)allocator, (void)result;
  return coda_fail(error, CODA_ERROR_TARGET, "bundle needs a GPU, and this runtime was built without (CODA_CUDA)");
}

static inline coda_code coda_cuda_load(coda_cuda *cuda, coda_model *model, coda_error *error) {
  (void)cuda, (void)model, (void)error;
  return CODA_OK;
}

static inline void coda_cuda_close(coda_cuda *cuda, const coda_allocator *allocator) { (void)cuda, (void)allocator; }
#endif

#endif
