/* Opens a bundle and answers what is in it. */
#include "model.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cpu.h"

enum { DIM_TEXT = 96, CONSTANT_ALIGNMENT = 64 };

/* --- opening ------------------------------------------------------------------------------------------------------ */

/* The first feature of a level that this CPU lacks; NULL if it has them all. */
static const char *missing_feature(const coda_level *level) {
  const char *name;
  for (size_t i = 1; (name = coda_section_string(&level->target, i)); i++)
    if (!coda_cpu_has(name))
      return name;
  return NULL;
}

static const char *level_name(const coda_level *level) { return coda_section_string(&level->target, 0); }

static coda_code check_level(const coda_level *level, coda_error *error) {
  coda_code code = coda_library_check(&level->library, error);
  const char *feature = code ? NULL : missing_feature(level);
  if (feature)
    return coda_fail(error, CODA_ERROR_TARGET,
                     "bundle needs the CPU feature '%s', which this CPU lacks: build it for another target", feature);
  return code;
}

/* The level that was asked for, or else the last one that runs here. */
static coda_code choose_level(coda_model *model, const char *target, coda_error *error) {
  const coda_bundle *bundle = &model->bundle;
  char names[256] = "";
  coda_code code = CODA_OK;
  for (uint32_t i = bundle->level_count; i-- > 0 && !model->level;) {
    const coda_level *level = &bundle->levels[i];
    const size_t used = strlen(names);
    snprintf(names + used, sizeof names - used, "%s'%s'", used ? ", " : "", level_name(level));
    if (target && strcmp(target, level_name(level)) != 0)
      continue;
    code = check_level(level, error);
    if (!code)
      model->level = level;
    if (target || (code && code != CODA_ERROR_TARGET))
      return code;
  }
  if (target)
    return coda_fail(error, CODA_ERROR_TARGET, "bundle holds no kernels for '%s', but for %s", target, names);
  return model->level ? CODA_OK : code;
}

static coda_code find_kernels(coda_model *model, coda_error *error) {
  const coda_plan *plan = &model->plan;
  model->kernels = calloc((size_t)plan->kernel_count + 1, sizeof *model->kernels);
  if (!model->kernels)
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for %u kernels", plan->kernel_count);
  for (uint32_t i = 0; i < plan->kernel_count; i++) {
    model->kernels[i] = coda_library_kernel(&model->library, plan->kernels[i]);
    if (!model->kernels[i])
      return coda_fail(error, CODA_ERROR_BUNDLE, "bundle's kernel library has no kernel '%s'", plan->kernels[i]);
  }
  return CODA_OK;
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

static coda_code describe(coda_model *model, coda_error *error) {
  const coda_plan *plan = &model->plan;
  size_t dims = plan->dim_count;
  for (uint32_t i = 0; i < plan->output_count; i++)
    dims += plan->outputs[i].rank;
  model->inputs = calloc((size_t)plan->input_count + 1, sizeof *model->inputs);
  model->outputs = calloc((size_t)plan->output_count + 1, sizeof *model->outputs);
  model->steps = calloc((size_t)plan->step_count + 1, sizeof *model->steps);
  model->dim_text = calloc(dims + 1, DIM_TEXT);
  if (!model->inputs || !model->outputs || !model->steps || !model->dim_text)
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for the description of a model");
  char *text = model->dim_text;
  for (uint32_t i = 0; i < plan->input_count; i++)
    describe_tensor(plan, &plan->inputs[i], &model->inputs[i], &text);
  for (uint32_t i = 0; i < plan->output_count; i++)
    describe_tensor(plan, &plan->outputs[i], &model->outputs[i], &text);
  for (uint32_t i = 0; i < plan->step_count; i++)
    model->steps[i] =
        (coda_step_info){plan->steps[i].name, plan->kernels[plan->steps[i].kernel], plan->steps[i].source};
  return CODA_OK;
}

/* Makes the constants that this level has in a layout of its own. */
static coda_code repack(coda_model *model, coda_error *error) {
  const coda_plan *plan = &model->plan;
  if (coda_block_reserve(&model->repacked, plan->repacked_bytes, CONSTANT_ALIGNMENT, &coda_system_allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for %zu bytes of constants", plan->repacked_bytes);
  for (uint32_t i = 0; i < plan->move_count; i++) {
    const plan_move *m = &plan->moves[i];
    const uint8_t *from = model->bundle.constants.data + m->from;
    uint8_t *to = model->repacked.data + m->to;
    for (uint32_t row = 0; row < m->rows; row++)
      memcpy(to + (size_t)row * m->to_stride, from + (size_t)row * m->from_stride, m->row_bytes);
  }
  return CODA_OK;
}

static coda_code load(coda_model *model, const char *target, coda_error *error) {
  coda_code code = coda_bundle_read(model->data, model->size, &model->bundle, error);
  if (!code)
    code = choose_level(model, target, error);
  if (!code)
    code = coda_plan_parse(&model->plan, model->level->plan.data, model->level->plan.size, model->bundle.constants.size,
                           error);
  if (!code && model->plan.kernel_count) /* a plan of no steps has no library either */
    code = coda_library_open(&model->library, &model->level->library, error);
  if (!code)
    code = find_kernels(model, error);
  if (!code)
    code = repack(model, error);
  return code ? code : describe(model, error);
}

/* The options that the caller's version of the structure has; the rest are defaults. */
static coda_model_options read_options(const coda_model_options *given) {
  coda_model_options options = {.size = sizeof options};
  if (given)
    memcpy(&options, given, given->size < sizeof options ? given->size : sizeof options);
  return options;
}

/* Takes over the mapping, also when it fails. */
static coda_code open_data(const uint8_t *data, size_t size, int mapped, const coda_model_options *given,
                           coda_model **result, coda_error *error) {
  coda_model *model = calloc(1, sizeof *model);
  if (!model) {
    if (mapped)
      munmap((void *)(uintptr_t)data, size);
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a model");
  }
  atomic_init(&model->holders, 1);
  model->data = data;
  model->size = size;
  model->mapped = mapped;
  model->library = CODA_LIBRARY_NONE;
  coda_code code = load(model, read_options(given).target, error);
  if (code)
    coda_model_free(model);
  else
    *result = model;
  return code;
}

coda_code coda_model_open(const char *path, const coda_model_options *options, coda_model **model, coda_error *error) {
  if (!path || !model)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open needs a path and a place for the model");
  *model = NULL;
  struct stat status;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    coda_code code = coda_fail(error, CODA_ERROR_FILE, "bundle '%s' cannot be opened: %s", path,
                               file < 0 ? strerror(errno) : "not a regular file");
    if (file >= 0)
      close(file);
    return code;
  }
  const size_t size = (size_t)status.st_size;
  void *data = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0) : NULL;
  close(file);
  if (!size)
    return coda_fail(error, CODA_ERROR_BUNDLE, "bundle '%s' is empty", path);
  if (data == MAP_FAILED)
    return coda_fail(error, CODA_ERROR_FILE, "bundle '%s' cannot be mapped: %s", path, strerror(errno));
  /* Where the system keeps files in large pages, it maps them as such if it knows before it reads. */
  madvise(data, size, MADV_HUGEPAGE);
  madvise(data, size, MADV_WILLNEED);
  coda_error inner;
  coda_code code = open_data(data, size, 1, options, model, &inner);
  return code ? coda_fail(error, code, "%s: %s", path, inner.message) : CODA_OK;
}

coda_code coda_model_open_memory(const void *data, size_t size, const coda_model_options *options, coda_model **model,
                                 coda_error *error) {
  if (!data || !model)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open_memory needs data and a place for the model");
  *model = NULL;
  if ((uintptr_t)data % CONSTANT_ALIGNMENT != 0)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "a bundle in memory must begin at a multiple of %d bytes",
                     CONSTANT_ALIGNMENT);
  return open_data(data, size, 0, options, model, error);
}

void coda_model_hold(coda_model *model) { atomic_fetch_add_explicit(&model->holders, 1, memory_order_relaxed); }

void coda_model_free(coda_model *model) {
  if (!model || atomic_fetch_sub_explicit(&model->holders, 1, memory_order_acq_rel) != 1)
    return;
  coda_library_close(&model->library);
  coda_plan_free(&model->plan);
  coda_block_free(&model->repacked, &coda_system_allocator);
  void *tables[] = {model->kernels, model->inputs, model->outputs, model->steps, model->dim_text};
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
    free(tables[i]);
  if (model->mapped)
    munmap((void *)(uintptr_t)model->data, model->size);
  free(model);
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
  const coda_section *metadata = &model->bundle.metadata;
  *key = coda_section_string(metadata, 2 * index);
  *value = coda_section_string(metadata, 2 * index + 1);
  return *key && *value ? 0 : -1;
}

const char *coda_model_feature(const coda_model *model, size_t index) {
  return coda_section_string(&model->level->target, index + 1);
}

const char *coda_model_target(const coda_model *model) { return level_name(model->level); }

const char *coda_model_held_target(const coda_model *model, size_t index) {
  return index < model->bundle.level_count ? level_name(&model->bundle.levels[index]) : NULL;
}

size_t coda_model_constant_bytes(const coda_model *model) { return model->bundle.constants.size; }
