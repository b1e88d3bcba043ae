/* What all models have, and models that are linked into the program. */
#include "model.h"

#include "cpu.h"
#include "platform.h"
#include "text.h"

enum { DIM_TEXT = 96, CONSTANT_ALIGNMENT = 64 };

/* --- making ------------------------------------------------------------------------------------------------------- */

coda_model_options coda_model_read_options(const coda_model_options *given) {
  coda_model_options options = {.size = sizeof options};
  if (given)
    memcpy(&options, given, given->size < sizeof options ? given->size : sizeof options);
  return options;
}

coda_code coda_model_make(const coda_model_options *options, coda_model **result, coda_error *error) {
  const coda_allocator *allocator = options->allocator ? options->allocator : coda_default_allocator;
  if (!allocator)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "there is no system to ask for memory: give an allocator");
  coda_model *model = allocator->allocate(allocator->context, sizeof *model, CONSTANT_ALIGNMENT);
  if (!model)
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a model");
  memset(model, 0, sizeof *model);
  atomic_init(&model->holders, 1);
  atomic_init(&model->verified, false);
  model->allocator = *allocator;
  *result = model;
  return CODA_OK;
}

coda_code coda_model_check_features(const coda_section *target, coda_error *error) {
  const char *name;
  for (size_t i = 1; (name = coda_section_string(target, i)); i++)
    if (!coda_cpu_has(name))
      return coda_fail(error, CODA_ERROR_TARGET,
                       "bundle needs the CPU feature '%s', which this CPU lacks: build it for another target", name);
  return CODA_OK;
}

static void cut_tables(coda_model *model, coda_cutter *c) {
  const coda_plan *plan = &model->plan;
  size_t dims = plan->dim_count;
  for (uint32_t i = 0; i < plan->output_count; i++)
    dims += plan->outputs[i].rank;
  model->kernels = coda_cut(c, plan->kernel_count, sizeof *model->kernels);
  model->inputs = coda_cut(c, plan->input_count, sizeof *model->inputs);
  model->outputs = coda_cut(c, plan->output_count, sizeof *model->outputs);
  model->steps = coda_cut(c, plan->step_count, sizeof *model->steps);
  model->dim_text = coda_cut(c, dims, DIM_TEXT);
}

static void describe_tensor(const coda_plan *plan, const plan_tensor *tensor, coda_tensor_info *info, char **text) {
  info->name = tensor->name;
  info->dtype = tensor->dtype;
  info->rank = (int32_t)tensor->rank;
  for (uint32_t axis = 0; axis < tensor->rank; axis++, *text += DIM_TEXT) {
    const plan_expr *e = &plan->exprs[tensor->dims[axis]];
    info->dims[axis] = e->op == EXPR_CONST ? e->a : -1;
    info->dim_text[axis] = *text;
    coda_plan_format(plan, tensor->dims[axis], *text, DIM_TEXT);
  }
}

static void describe(coda_model *model) {
  const coda_plan *plan = &model->plan;
  char *text = model->dim_text;
  for (uint32_t i = 0; i < plan->input_count; i++)
    describe_tensor(plan, &plan->inputs[i], &model->inputs[i], &text);
  for (uint32_t i = 0; i < plan->output_count; i++)
    describe_tensor(plan, &plan->outputs[i], &model->outputs[i], &text);
  for (uint32_t i = 0; i < plan->step_count; i++)
    model->steps[i] =
        (coda_step_info){plan->steps[i].name, plan->kernels[plan->steps[i].kernel], plan->steps[i].source};
}

coda_code coda_model_parse(coda_model *model, const coda_section *plan, coda_error *error) {
  const coda_code code =
      coda_plan_parse(&model->plan, plan->data, plan->size, model->constants.size, &model->allocator, error);
  if (code)
    return code;
  coda_cutter cutter = {NULL, 0, false};
  cut_tables(model, &cutter);
  if (coda_cut_begin(&cutter, &model->tables, &model->allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for the description of a model");
  cut_tables(model, &cutter);
  describe(model);
  return CODA_OK;
}

coda_code coda_model_repack(coda_model *model, coda_error *error) {
  const coda_plan *plan = &model->plan;
  if (coda_block_reserve(&model->repacked, plan->repacked_bytes, CONSTANT_ALIGNMENT, &model->allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for %zu bytes of constants", plan->repacked_bytes);
  for (uint32_t i = 0; i < plan->move_count; i++) {
    const plan_move *m = &plan->moves[i];
    const uint8_t *from = model->constants.data + m->from;
    uint8_t *to = model->repacked.data + m->to;
    for (uint32_t row = 0; row < m->rows; row++)
      memcpy(to + (size_t)row * m->to_stride, from + (size_t)row * m->from_stride, m->row_bytes);
  }
  return CODA_OK;
}

/* --- linked models ------------------------------------------------------------------------------------------------ */

static coda_code open_linked(coda_model *model, const coda_linked_model *linked, coda_error *error) {
  const coda_section plan = {linked->plan, linked->plan_bytes};
  model->target = (coda_section){(const uint8_t *)linked->target, linked->target_bytes};
  model->metadata = (coda_section){(const uint8_t *)linked->metadata, linked->metadata_bytes};
  model->constants = (coda_section){linked->constants, linked->constant_bytes};
  if (!model->target.size || !coda_section_is_strings(&model->target) || !coda_section_is_strings(&model->metadata))
    return coda_fail(error, CODA_ERROR_BUNDLE, "the linked model's target or metadata do not end in a zero byte");
  if ((uintptr_t)linked->constants % CONSTANT_ALIGNMENT != 0)
    return coda_fail(error, CODA_ERROR_BUNDLE, "the linked model's constants do not begin at a multiple of %d bytes",
                     CONSTANT_ALIGNMENT);
  model->held[0] = coda_section_string(&model->target, 0);
  coda_code code = coda_model_check_features(&model->target, error);
  if (!code)
    code = coda_model_parse(model, &plan, error);
  if (code)
    return code;
  if (linked->kernel_count != model->plan.kernel_count)
    return coda_fail(error, CODA_ERROR_BUNDLE, "the linked model has %" PRIu32 " kernels, its plan %" PRIu32,
                     linked->kernel_count, model->plan.kernel_count);
  memcpy(model->kernels, linked->kernels, linked->kernel_count * sizeof *linked->kernels);
  atomic_store(&model->verified, true);
  return coda_model_repack(model, error);
}

coda_code coda_model_open_linked(const coda_linked_model *linked, const coda_model_options *given, coda_model **result,
                                 coda_error *error) {
  if (!linked || !result)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open_linked needs a linked model and a place for it");
  *result = NULL;
  if (linked->abi != CODA_LINKED_VERSION)
    return coda_fail(error, CODA_ERROR_BUNDLE,
                     "the linked model is of version %" PRIu32 ", this runtime reads version %d: package it again",
                     linked->abi, CODA_LINKED_VERSION);
  const coda_model_options options = coda_model_read_options(given);
  coda_model *model = NULL;
  coda_code code = coda_model_make(&options, &model, error);
  if (!code)
    code = open_linked(model, linked, error);
  if (code)
    coda_model_free(model);
  else
    *result = model;
  return code;
}

/* --- sharing ------------------------------------------------------------------------------------------------------ */

void coda_model_hold(coda_model *model) { atomic_fetch_add_explicit(&model->holders, 1, memory_order_relaxed); }

void coda_model_free(coda_model *model) {
  if (!model || atomic_fetch_sub_explicit(&model->holders, 1, memory_order_acq_rel) != 1)
    return;
  const coda_allocator allocator = model->allocator;
  if (model->close)
    model->close(model);
  coda_block_free(&model->repacked, &allocator);
  coda_block_free(&model->tables, &allocator);
  coda_plan_free(&model->plan, &allocator);
  allocator.release(allocator.context, model, sizeof *model);
}

/* --- queries ------------------------------------------------------------------------------------------------------ */

size_t coda_model_input_count(const coda_model *model) { return model->plan.input_count; }

size_t coda_model_output_count(const coda_model *model) { return model->plan.output_count; }

size_t coda_model_step_count(const coda_model *model) { return model->plan.step_count; }

const coda_tensor_info *coda_model_input(const coda_model *model, size_t index) {
  return index < model->plan.input_count ? &model->inputs[index] : NULL;
}

const coda_tensor_info *coda_model_output(const coda_model *model, size_t index) {
  return index < model->plan.output_count ? &model->outputs[index] : NULL;
}

const coda_step_info *coda_model_step(const coda_model *model, size_t index) {
  return index < model->plan.step_count ? &model->steps[index] : NULL;
}

int coda_model_metadata(const coda_model *model, size_t index, const char **key, const char **value) {
  *key = coda_section_string(&model->metadata, 2 * index);
  *value = coda_section_string(&model->metadata, 2 * index + 1);
  return *key && *value ? 0 : -1;
}

const char *coda_model_feature(const coda_model *model, size_t index) {
  return coda_section_string(&model->target, index + 1);
}

const char *coda_model_target(const coda_model *model) { return coda_section_string(&model->target, 0); }

const char *coda_model_held_target(const coda_model *model, size_t index) {
  return index < CODA_MAX_LEVELS ? model->held[index] : NULL;
}

size_t coda_model_constant_bytes(const coda_model *model) { return model->constants.size; }
