/* An opened bundle. */
#ifndef CODA_MODEL_H
#define CODA_MODEL_H

#include <stdatomic.h>

#include "bundle.h"
#include "loader.h"
#include "memory.h"
#include "plan.h"

struct coda_model {
  atomic_int holders; /* the caller and each session */
  const uint8_t *data;
  size_t size;
  int mapped; /* whether data is our mapping of a file */
  coda_bundle bundle;
  const coda_level *level; /* that is in use */
  coda_plan plan;
  coda_block repacked; /* constants in the level's own layout */
  coda_library library;
  coda_kernel *kernels; /* by the plan's kernel index */
  coda_tensor_info *inputs, *outputs;
  coda_step_info *steps;
  char *dim_text; /* what the inputs' and outputs' dim_text point into */
};

void coda_model_hold(coda_model *model);

#endif
