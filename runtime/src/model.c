/* Opens a bundle and answers what is in it. */
#include "model.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cpu.h"

enum { DIM_TEXT = 96, CONSTANT_ALIGNMENT = 64 };

/* --- opening ------------------------------------------------------------------------------------------------------ */

static coda_code check_features(const coda_model *model, coda_error *error) {
  const coda_section *features = &model->sections[SECTION_FEATURES];
  if (!coda_section_is_strings(features) || !coda_section_is_strings(&model->sections[SECTION_METADATA]))
    return coda_fail(error, CODA_ERROR_BUNDLE, "bundle is invalid: its features or metadata do not end in a zero byte");
  const char *name;
  for (size_t i = 0; (name = coda_section_string(features, i)); i++)
    if (!coda_cpu_has(name))
      return coda_fail(error, CODA_ERROR_TARGET,
                       "bundle needs the CPU feature '%s', which this CPU lacks: build it for another target", name);
  return CODA_OK;
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

static coda_code load(coda_model *model, coda_error *error) {
  coda_code code = coda_bundle_read(model->data, model->size, model->sections, error);
  const coda_section *plan = &model->sections[SECTION_PLAN];
  if (!code)
    code = check_features(model, error);
  if (!code)
    code = coda_plan_parse(&model->plan, plan->data, plan->size, model->sections[SECTION_CONSTANTS].size, error);
  if (!code && model->plan.kernel_count) /* a plan of no steps has no library either */
    code = coda_library_open(&model->library, &model->sections[SECTION_LIBRARY], error);
  if (!code)
    code = find_kernels(model, error);
  return code ? code : describe(model, error);
}

/* Takes over the mapping, also when it fails. */
static coda_code open_data(const uint8_t *data, size_t size, int mapped, coda_model **result, coda_error *error) {
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
  coda_code code = load(model, error);
  if (code)
    coda_model_free(model);
  else
    *result = model;
  return code;
}

coda_code coda_model_open(const char *path, coda_model **model, coda_error *error) {
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
  madvise(data, size, MADV_WILLNEED);
  coda_error inner;
  coda_code code = open_data(data, size, 1, model, &inner);
  return code ? coda_fail(error, code, "%s: %s", path, inner.message) : CODA_OK;
}

coda_code coda_model_open_memory(const void *data, size_t size, coda_model **model, coda_error *error) {
  if (!data || !model)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open_memory needs data and a place for the model");
  *model = NULL;
  if ((uintptr_t)data % CONSTANT_ALIGNMENT != 0)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "a bundle in memory must begin at a multiple of %d bytes",
                     CONSTANT_ALIGNMENT);
  return open_data(data, size, 0, model, error);
}

void coda_model_hold(coda_model *model) { atomic_fetch_add_explicit(&model->holders, 1, memory_order_relaxed); }

void coda_model_free(coda_model *model) {
  if (!model || atomic_fetch_sub_explicit(&model->holders, 1, memory_order_acq_rel) != 1)
    return;
  coda_library_close(&model->library);
  coda_plan_free(&model->plan);
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
  const coda_section *metadata = &model->sections[SECTION_METADATA];
  *key = coda_section_string(metadata, 2 * index);
  *value = coda_section_string(metadata, 2 * index + 1);
  return *key && *value ? 0 : -1;
}

const char *coda_model_feature(const coda_model *model, size_t index) {
  return coda_section_string(&model->sections[SECTION_FEATURES], index);
}

size_t coda_model_constant_bytes(const coda_model *model) { return model->sections[SECTION_CONSTANTS].size; }
