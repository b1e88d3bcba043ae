/* An opened model, wherever it comes from. */
#ifndef CODA_MODEL_H
#define CODA_MODEL_H

#include <stdatomic.h>

#include "memory.h"
#include "plan.h"
#include "pool.h"
#include "section.h"

enum { CODA_MAX_LEVELS = 16 };

struct coda_cuda;
struct coda_layout;

/* How a model runs on another device than the CPU. */
typedef struct {
  /* The steps, for inputs and outputs that have been checked and have memory. */
  coda_code (*run)(coda_session *session, struct coda_layout *layout, const coda_tensor *inputs, coda_tensor *outputs,
                   coda_error *error);
  void (*free_session)(coda_session *session);
} coda_device_ops;

struct coda_model {
  atomic_int holders; /* the caller and each session */
  coda_allocator allocator;
  coda_section target, metadata, constants; /* target: its name, then the CPU features that the kernels need */
  const char *held[CODA_MAX_LEVELS + 1]; /* names of targets that there are kernels for */
  coda_plan plan;
  coda_block repacked; /* constants in the level's own layout */
  coda_block tables; /* what the pointers below point into */
  coda_kernel *kernels; /* by the plan's kernel index */
  coda_tensor_info *inputs, *outputs;
  coda_step_info *steps;
  char *dim_text; /* what the inputs' and outputs' dim_text point into */
  atomic_bool verified; /* whether the constants are known to be as they were written */
  /* Checks them, with the threads and the memory of a session. */
  coda_code (*verify)(const coda_model *model, coda_pool *pool, const coda_allocator *allocator, coda_error *error);
  void (*close)(coda_model *model); /* gives back what `origin` holds; NULL where that is nothing */
  void *origin;
  const coda_device_ops *device; /* NULL: the CPU */
  struct coda_cuda *cuda; /* where `device` is a GPU; belongs to `origin` */
};

/* The options that the caller's version of the structure has; the rest are defaults. */
coda_model_options coda_model_read_options(const coda_model_options *given);

/* A model that holds nothing yet, for its first holder. */
coda_code coda_model_make(const coda_model_options *options, coda_model **model, coda_error *error);

/* Whether this CPU has the features that kernels need. */
coda_code coda_model_check_features(const coda_section *target, coda_error *error);

/* Reads the plan, and makes room for `kernels`, which the caller fills. Target and constants are there already. */
coda_code coda_model_parse(coda_model *model, const coda_section *plan, coda_error *error);

/* Makes the constants that this level has in a layout of its own. */
coda_code coda_model_repack(coda_model *model, coda_error *error);

void coda_model_hold(coda_model *model);

#endif
