/* Binds symbols to the inputs' dimensions, evaluates the size table, and packs the arena by liveness. */
#include "layout.h"

#include "checked.h"
#include "text.h"

/* --- memory ------------------------------------------------------------------------------------------------------- */

size_t coda_layout_bytes(const coda_plan *plan) {
  const size_t words = (size_t)plan->dim_count + plan->expr_count + plan->input_count + plan->output_count +
                       plan->buffer_count + plan->int_count + plan->operand_count + plan->read_count;
  return (words + 1) * sizeof(int64_t) + plan->phase_count * sizeof(coda_arena);
}

void coda_layout_attach(coda_layout *layout, const coda_plan *plan, void *memory) {
  memset(layout, 0, sizeof *layout);
  layout->dims = memory;
  layout->values = layout->dims + plan->dim_count;
  layout->tensor_bytes = layout->values + plan->expr_count;
  layout->offsets = layout->tensor_bytes + plan->input_count + plan->output_count;
  layout->ints = layout->offsets + plan->buffer_count;
  layout->addresses = (uint64_t *)(layout->ints + plan->int_count);
  layout->data = (int64_t *)(layout->addresses + plan->operand_count);
  layout->arenas = (coda_arena *)(layout->data + plan->read_count);
}

/* --- inputs ------------------------------------------------------------------------------------------------------- */

enum { SHAPE_TEXT = 512, DIM_TEXT = 96 };

static void format_shape(const coda_plan *plan, const plan_tensor *tensor, char text[SHAPE_TEXT]) {
  char dim[DIM_TEXT];
  size_t length = 0;
  text[length++] = '[';
  for (uint32_t axis = 0; axis < tensor->rank && length + DIM_TEXT + 4 < SHAPE_TEXT; axis++) {
    coda_plan_format(plan, tensor->dims[axis], dim, sizeof dim);
    coda_print(text + length, SHAPE_TEXT - length, "%s%s", axis ? ", " : "", dim);
    length += coda_length(text + length);
  }
  coda_print(text + length, SHAPE_TEXT - length, "]");
}

coda_code coda_layout_check_types(const coda_plan *plan, const coda_tensor *inputs, coda_error *error) {
  char shape[SHAPE_TEXT];
  for (uint32_t i = 0; i < plan->input_count; i++) {
    const plan_tensor *expected = &plan->inputs[i];
    const coda_tensor *given = &inputs[i];
    if (given->dtype == expected->dtype && given->rank == (int32_t)expected->rank)
      continue;
    format_shape(plan, expected, shape);
    if (given->dtype == 0)
      return coda_fail(error, CODA_ERROR_SHAPE, "input '%s' is missing: give a %s tensor of shape %s", expected->name,
                       coda_dtype_name(expected->dtype), shape);
    if (given->dtype != expected->dtype)
      return coda_fail(error, CODA_ERROR_SHAPE, "input '%s': element type is %s, expected %s", expected->name,
                       coda_dtype_name(given->dtype), coda_dtype_name(expected->dtype));
    return coda_fail(error, CODA_ERROR_SHAPE, "input '%s' has %" PRId32 " dimensions, expected %" PRIu32 ": %s",
                     expected->name, given->rank, expected->rank, shape);
  }
  return CODA_OK;
}

int coda_layout_matches(const coda_layout *layout, const coda_plan *plan, const coda_tensor *inputs) {
  const int64_t *dims = layout->dims;
  for (uint32_t i = 0; i < plan->input_count; dims += plan->inputs[i].rank, i++)
    if (!coda_same_bytes(dims, inputs[i].dims, plan->inputs[i].rank * sizeof *dims))
      return 0;
  return 1;
}

static coda_code evaluate(coda_layout *layout, const coda_plan *plan, const coda_tensor *inputs, coda_error *error) {
  int64_t symbols[CODA_MAX_SYMBOLS];
  int64_t *dims = layout->dims;
  for (uint32_t i = 0; i < plan->input_count; dims += plan->inputs[i].rank, i++) {
    memcpy(dims, inputs[i].dims, plan->inputs[i].rank * sizeof *dims);
    for (uint32_t axis = 0; axis < plan->inputs[i].rank; axis++)
      if (dims[axis] < 0)
        return coda_fail(error, CODA_ERROR_SHAPE,
                         "input '%s': dimension %" PRIu32 " is %" PRId64 ", expected 0 or more", plan->inputs[i].name,
                         axis, dims[axis]);
  }
  for (uint32_t s = 0; s < plan->symbol_count; s++)
    symbols[s] = inputs[plan->bindings[s].input].dims[plan->bindings[s].axis];
  return coda_plan_evaluate(plan, 0, symbols, layout->data, layout->values, error);
}

static coda_code wrong_dimension(const coda_layout *layout, const coda_plan *plan, uint32_t input, uint32_t axis,
                                 int64_t found, coda_error *error) {
  const plan_tensor *tensor = &plan->inputs[input];
  const uint32_t entry = tensor->dims[axis];
  const plan_expr *e = &plan->exprs[entry];
  const int64_t expected = layout->values[entry];
  char text[DIM_TEXT];
  coda_plan_format(plan, entry, text, sizeof text);
  if (e->op == EXPR_CONST)
    return coda_fail(error, CODA_ERROR_SHAPE, "input '%s': dimension %" PRIu32 " is %" PRId64 ", expected %" PRId64,
                     tensor->name, axis, found, expected);
  if (e->op == EXPR_SYMBOL)
    return coda_fail(error, CODA_ERROR_SHAPE,
                     "input '%s': dimension %" PRIu32 " is %" PRId64 ", expected %s = %" PRId64 " (from input '%s')",
                     tensor->name, axis, found, text, expected, plan->inputs[plan->bindings[e->a].input].name);
  return coda_fail(error, CODA_ERROR_SHAPE, "input '%s': dimension %" PRIu32 " is %" PRId64 ", expected %s = %" PRId64,
                   tensor->name, axis, found, text, expected);
}

static coda_code check_dimensions(const coda_layout *layout, const coda_plan *plan, coda_error *error) {
  const int64_t *dims = layout->dims;
  for (uint32_t i = 0; i < plan->input_count; dims += plan->inputs[i].rank, i++)
    for (uint32_t axis = 0; axis < plan->inputs[i].rank; axis++)
      if (dims[axis] != layout->values[plan->inputs[i].dims[axis]])
        return wrong_dimension(layout, plan, i, axis, dims[axis], error);
  return CODA_OK;
}

static coda_code broken(const coda_layout *layout, const coda_plan *plan, const plan_constraint *c, coda_error *error) {
  const int64_t left = layout->values[c->left], right = layout->values[c->right];
  const bool fixed_left = plan->exprs[c->left].op == EXPR_CONST, fixed_right = plan->exprs[c->right].op == EXPR_CONST;
  char left_text[DIM_TEXT], right_text[DIM_TEXT];
  coda_plan_format(plan, c->left, left_text, sizeof left_text);
  coda_plan_format(plan, c->right, right_text, sizeof right_text);
  if (c->relation == RELATION_AT_MOST && fixed_left)
    return coda_fail(error, CODA_ERROR_SHAPE, "%s = %" PRId64 " is below %" PRId64 ": %s", right_text, right, left,
                     c->text);
  const char *relation = c->relation == RELATION_AT_MOST ? "exceeds" : "differs from";
  if (fixed_right)
    return coda_fail(error, CODA_ERROR_SHAPE, "%s = %" PRId64 " %s %" PRId64 ": %s", left_text, left, relation, right,
                     c->text);
  return coda_fail(error, CODA_ERROR_SHAPE, "%s = %" PRId64 " %s %s = %" PRId64 ": %s", left_text, left, relation,
                   right_text, right, c->text);
}

static coda_code check_constraints(const coda_layout *layout, const coda_plan *plan, uint32_t phase,
                                   coda_error *error) {
  for (uint32_t i = 0; i < plan->constraint_count; i++) {
    const plan_constraint *c = &plan->constraints[i];
    if (c->phase != phase)
      continue;
    const int64_t left = layout->values[c->left], right = layout->values[c->right];
    if (c->relation == RELATION_AT_MOST ? left > right : left != right)
      return broken(layout, plan, c, error);
  }
  return CODA_OK;
}

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* The most bytes of a tensor, or of an arena: paddings and a second one can be added without overflow. */
static const int64_t MAX_BYTES = SIZE_MAX / 4;

static coda_code measure_tensor(const coda_layout *layout, const plan_tensor *tensor, int64_t *bytes,
                                coda_error *error) {
  *bytes = (int64_t)coda_dtype_size(tensor->dtype);
  for (uint32_t axis = 0; axis < tensor->rank; axis++) {
    const int64_t dim = layout->values[tensor->dims[axis]];
    if (dim < 0)
      return coda_fail(error, CODA_ERROR_SHAPE, "'%s' would have dimension %" PRIu32 " = %" PRId64 " for these inputs",
                       tensor->name, axis, dim);
    if (!coda_mul_i64(*bytes, dim, bytes) || *bytes > MAX_BYTES)
      return coda_fail(error, CODA_ERROR_SHAPE, "'%s' would be larger than memory can be for these inputs",
                       tensor->name);
  }
  return CODA_OK;
}

static coda_code check_buffers(const coda_layout *layout, const coda_plan *plan, uint32_t phase, coda_error *error) {
  for (uint32_t i = 0; i < plan->buffer_count; i++) {
    const plan_buffer *b = &plan->buffers[i];
    if (b->phase != phase)
      continue;
    const int64_t size = layout->values[b->size];
    if (size < 0 || size > MAX_BYTES)
      return coda_fail(error, CODA_ERROR_SHAPE, "buffer %" PRIu32 " would have %" PRId64 " bytes for these inputs", i,
                       size);
    if (b->kind != BUFFER_INPUT && b->kind != BUFFER_OUTPUT)
      continue;
    const uint64_t tensor = b->kind == BUFFER_INPUT ? b->index : plan->input_count + b->index;
    if (size > layout->tensor_bytes[tensor])
      return coda_fail(error, CODA_ERROR_BUNDLE,
                       "bundle's plan is invalid: buffer %" PRIu32 " has %" PRId64 " bytes, its tensor %" PRId64, i,
                       size, layout->tensor_bytes[tensor]);
  }
  return CODA_OK;
}

static coda_code measure(coda_layout *layout, const coda_plan *plan, uint32_t phase, coda_error *error) {
  coda_code code = CODA_OK;
  for (uint32_t i = 0; i < plan->input_count && !phase && !code; i++)
    code = measure_tensor(layout, &plan->inputs[i], &layout->tensor_bytes[i], error);
  for (uint32_t i = 0; i < plan->output_count && !code; i++)
    if (plan->outputs[i].phase == phase)
      code = measure_tensor(layout, &plan->outputs[i], &layout->tensor_bytes[plan->input_count + i], error);
  if (!code)
    code = check_buffers(layout, plan, phase, error);
  int64_t *ints = layout->ints;
  for (uint32_t i = 0; i < plan->step_count && !code; ints += plan->steps[i].int_count, i++) {
    const plan_step *s = &plan->steps[i];
    if (s->phase != phase)
      continue;
    const int64_t items = layout->values[s->items], scratch = layout->values[s->scratch];
    if (items < 0 || scratch < 0 || scratch > INT32_MAX)
      code = coda_fail(error, CODA_ERROR_SHAPE,
                       "step '%s' would have %" PRId64 " items and %" PRId64 " bytes of scratch for these inputs",
                       s->name, items, scratch);
    else if ((size_t)scratch > layout->scratch_bytes)
      layout->scratch_bytes = (size_t)scratch;
    for (uint32_t k = 0; k < s->int_count; k++)
      if (plan->exprs[s->ints[k]].op != EXPR_RUN) /* which each run sets */
        ints[k] = layout->values[s->ints[k]];
  }
  return code;
}

/* --- arena -------------------------------------------------------------------------------------------------------- */

static int64_t padded(const coda_layout *layout, const plan_buffer *b) {
  return (layout->values[b->size] + CODA_ALIGNMENT - 1) / CODA_ALIGNMENT * CODA_ALIGNMENT;
}

/* Sorts buffers by size, largest first (Shell 1959). */
static void sort_by_size(const coda_layout *layout, const coda_plan *plan, uint32_t *order, uint32_t count) {
  for (uint32_t gap = count / 2; gap; gap /= 2)
    for (uint32_t i = gap; i < count; i++) {
      const uint32_t moving = order[i];
      const int64_t size = layout->values[plan->buffers[moving].size];
      uint32_t k = i;
      for (; k >= gap && layout->values[plan->buffers[order[k - gap]].size] < size; k -= gap)
        order[k] = order[k - gap];
      order[k] = moving;
    }
}

static bool overlap(const plan_buffer *a, const plan_buffer *b) { return a->first <= b->last && b->first <= a->last; }

/* The smallest gap for `buffer` between those placed that live at the same time; `placed` is sorted by offset. */
static int64_t best_offset(const coda_layout *layout, const coda_plan *plan, const plan_buffer *buffer,
                           const uint32_t *placed, uint32_t count) {
  const int64_t need = padded(layout, buffer);
  int64_t end = 0, best = -1, best_gap = INT64_MAX;
  for (uint32_t i = 0; i < count; i++) {
    const plan_buffer *other = &plan->buffers[placed[i]];
    if (!overlap(buffer, other))
      continue;
    const int64_t offset = layout->offsets[placed[i]], gap = offset - end;
    if (gap >= need && gap < best_gap)
      best = end, best_gap = gap;
    if (offset + padded(layout, other) > end)
      end = offset + padded(layout, other);
  }
  return best >= 0 ? best : end;
}

static coda_code pack(coda_layout *layout, const coda_plan *plan, uint32_t phase, uint32_t *order, coda_error *error) {
  size_t *bytes = &layout->arenas[phase].bytes;
  uint32_t count = 0, placed_count = 0;
  uint32_t *placed = order + plan->buffer_count;
  int64_t total = 0;
  for (uint32_t i = 0; i < plan->buffer_count; i++)
    if (plan->buffers[i].kind == BUFFER_ARENA && plan->buffers[i].phase == phase) {
      order[count++] = i;
      total += padded(layout, &plan->buffers[i]);
      if (total > MAX_BYTES) /* so that no offset below can overflow */
        return coda_fail(error, CODA_ERROR_SHAPE, "the arena would be larger than memory can be for these inputs");
    }
  sort_by_size(layout, plan, order, count);
  *bytes = 0;
  for (uint32_t i = 0; i < count; i++) {
    const plan_buffer *b = &plan->buffers[order[i]];
    const int64_t offset = best_offset(layout, plan, b, placed, placed_count);
    layout->offsets[order[i]] = offset;
    uint32_t k = placed_count++;
    for (; k && layout->offsets[placed[k - 1]] > offset; k--)
      placed[k] = placed[k - 1];
    placed[k] = order[i];
    const size_t end = (size_t)(offset + padded(layout, b));
    if (end > *bytes)
      *bytes = end;
  }
  return CODA_OK;
}

/* All of a phase behind its sizes. */
static coda_code lay_out(coda_layout *layout, const coda_plan *plan, uint32_t phase, uint32_t *order,
                         coda_error *error) {
  coda_code code = check_constraints(layout, plan, phase, error);
  if (!code)
    code = measure(layout, plan, phase, error);
  if (!code)
    code = pack(layout, plan, phase, order, error);
  layout->arenas[phase].memory = NULL;
  if (!code)
    layout->phases = phase + 1;
  return code;
}

coda_code coda_layout_make(coda_layout *layout, const coda_plan *plan, const coda_tensor *inputs, uint32_t *order,
                           coda_error *error) {
  layout->used = 0;
  layout->phases = 0;
  layout->scratch_bytes = 0;
  coda_code code = evaluate(layout, plan, inputs, error);
  if (!code)
    code = check_dimensions(layout, plan, error);
  return code ? code : lay_out(layout, plan, 0, order, error);
}

/* The value of a read; its buffer may be smaller than the plan believed. */
static coda_code read_size(const coda_layout *layout, const coda_plan *plan, const plan_read *r,
                           const coda_tensor *inputs, const coda_tensor *outputs, int64_t *value, coda_error *error) {
  const plan_buffer *b = &plan->buffers[r->buffer];
  const size_t width = coda_dtype_size(r->dtype);
  if (r->element >= (uint64_t)layout->values[b->size] / width)
    return coda_fail(error, CODA_ERROR_SHAPE, "size '%s' is element %" PRIu64 " of a tensor of %" PRId64 " bytes",
                     r->name, r->element, layout->values[b->size]);
  const uint8_t *data = b->kind == BUFFER_INPUT    ? inputs[b->index].data
                        : b->kind == BUFFER_OUTPUT ? outputs[b->index].data
                                                   : layout->arenas[b->phase].memory + layout->offsets[r->buffer];
  int32_t narrow;
  if (r->dtype == CODA_INT64) {
    memcpy(value, data + r->element * width, width);
  } else {
    memcpy(&narrow, data + r->element * width, width);
    *value = narrow;
  }
  if (*value < 0)
    return coda_fail(error, CODA_ERROR_SHAPE, "size '%s' is %" PRId64 ", expected 0 or more", r->name, *value);
  return CODA_OK;
}

coda_code coda_layout_continue(coda_layout *layout, const coda_plan *plan, uint32_t phase, const coda_tensor *inputs,
                               const coda_tensor *outputs, uint32_t *order, coda_error *error) {
  bool known = layout->phases > phase;
  for (uint32_t i = 0; i < plan->read_count; i++) {
    int64_t value = 0;
    if (plan->reads[i].phase != phase)
      continue;
    if (read_size(layout, plan, &plan->reads[i], inputs, outputs, &value, error)) {
      layout->phases = phase;
      return CODA_ERROR_SHAPE;
    }
    known = known && layout->data[i] == value;
    layout->data[i] = value;
  }
  if (known)
    return CODA_OK;
  layout->phases = phase;
  coda_code code = coda_plan_evaluate(plan, phase, NULL, layout->data, layout->values, error);
  return code ? code : lay_out(layout, plan, phase, order, error);
}

void coda_layout_place(coda_layout *layout, const coda_plan *plan, uint32_t phase, const uint8_t *constants,
                       const uint8_t *repacked, const uint8_t *arena) {
  uint64_t *address = layout->addresses;
  for (uint32_t i = 0; i < plan->step_count; i++)
    for (uint32_t k = 0; k < plan->steps[i].buffer_count; k++, address++) {
      const uint32_t index = plan->steps[i].buffers[k];
      const plan_buffer *b = &plan->buffers[index];
      if (b->phase != phase)
        continue;
      if (b->kind == BUFFER_CONSTANT)
        *address = (uintptr_t)constants + b->index;
      else if (b->kind == BUFFER_REPACKED)
        *address = (uintptr_t)repacked + b->index;
      else if (b->kind == BUFFER_ARENA)
        *address = (uintptr_t)arena + layout->offsets[index]; /* NULL where it is empty */
    }
  layout->arenas[phase].memory = arena;
}
