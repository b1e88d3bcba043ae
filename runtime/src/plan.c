/* Reads the plan section (docs/bundle-format.md) and checks every field: what comes after can trust all indices. */
#include "plan.h"

#include "bytes.h"
#include "text.h"

enum {
  HEADER = 48,
  EXPR = 24,
  TENSOR = 16,
  BUFFER = 24,
  STEP = 56,
  WORD = 4,
  CONSTRAINT = 16,
  READ = 24,
  MOVE = 32,
  CONSTANT_ALIGNMENT = 64,
  MAX_OPERANDS = 1 << 24, /* of all steps: steps may share words, so that a small plan could ask for much memory */
};

#define BAD(...) coda_fail(error, CODA_ERROR_BUNDLE, "bundle's plan is invalid: " __VA_ARGS__)

/* The section's tables as bytes. */
typedef struct {
  const uint8_t *exprs, *tensors, *buffers, *steps, *symbols, *kernels, *words, *constraints, *reads, *moves;
  const char *strings;
  uint32_t string_bytes;
} raw_tables;

static coda_code locate(coda_plan *plan, raw_tables *raw, const uint8_t *data, size_t size, coda_error *error) {
  if (size < HEADER)
    return BAD("it has %zu bytes, its header alone needs %d", size, HEADER);
  uint32_t *const counts[] = {&plan->symbol_count, &plan->expr_count,       &plan->input_count, &plan->output_count,
                              &plan->buffer_count, &plan->kernel_count,     &plan->step_count,  &plan->word_count,
                              &raw->string_bytes,  &plan->constraint_count, &plan->read_count,  &plan->move_count};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    *counts[i] = coda_u32(data + 4 * i);
  if (plan->symbol_count > CODA_MAX_SYMBOLS)
    return BAD("it has %" PRIu32 " symbols, at most %d can be", plan->symbol_count, CODA_MAX_SYMBOLS);
  const uint64_t tensors = (uint64_t)plan->input_count + plan->output_count;
  const struct {
    const uint8_t **table;
    uint64_t bytes;
  } tables[] = {
      {&raw->exprs, (uint64_t)plan->expr_count * EXPR},
      {&raw->tensors, tensors * TENSOR},
      {&raw->buffers, (uint64_t)plan->buffer_count * BUFFER},
      {&raw->steps, (uint64_t)plan->step_count * STEP},
      {&raw->symbols, (uint64_t)plan->symbol_count * WORD},
      {&raw->kernels, (uint64_t)plan->kernel_count * WORD},
      {&raw->words, (uint64_t)plan->word_count * WORD},
      {&raw->constraints, (uint64_t)plan->constraint_count * CONSTRAINT},
      {&raw->reads, (uint64_t)plan->read_count * READ},
      {&raw->moves, (uint64_t)plan->move_count * MOVE},
  };
  uint64_t offset = HEADER; /* cannot overflow: eleven products of 32 bits and less than 64 */
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
    if (tables[i].bytes > size - offset)
      return BAD("its tables need more than its %zu bytes", size);
    *tables[i].table = data + offset;
    offset += tables[i].bytes;
  }
  if (raw->string_bytes != size - offset)
    return BAD("its tables and strings take %" PRIu64 " bytes, it has %zu", offset + raw->string_bytes, size);
  raw->strings = (const char *)data + offset;
  if (raw->string_bytes == 0 || raw->strings[raw->string_bytes - 1] != 0)
    return BAD("its strings do not end in a zero byte");
  return CODA_OK;
}

static void cut_tables(coda_plan *plan, coda_cutter *c) {
  plan->symbols = coda_cut(c, plan->symbol_count, sizeof *plan->symbols);
  plan->bindings = coda_cut(c, plan->symbol_count, sizeof *plan->bindings);
  plan->exprs = coda_cut(c, plan->expr_count, sizeof *plan->exprs);
  plan->inputs = coda_cut(c, plan->input_count, sizeof *plan->inputs);
  plan->outputs = coda_cut(c, plan->output_count, sizeof *plan->outputs);
  plan->buffers = coda_cut(c, plan->buffer_count, sizeof *plan->buffers);
  plan->kernels = coda_cut(c, plan->kernel_count, sizeof *plan->kernels);
  plan->steps = coda_cut(c, plan->step_count, sizeof *plan->steps);
  plan->constraints = coda_cut(c, plan->constraint_count, sizeof *plan->constraints);
  plan->reads = coda_cut(c, plan->read_count, sizeof *plan->reads);
  plan->moves = coda_cut(c, plan->move_count, sizeof *plan->moves);
  plan->phases = coda_cut(c, (uint64_t)plan->read_count + 2, sizeof *plan->phases);
  plan->words = coda_cut(c, plan->word_count, sizeof *plan->words);
}

static int allocate(coda_plan *plan, const coda_allocator *allocator) {
  coda_cutter cutter = {NULL, 0, false};
  cut_tables(plan, &cutter);
  if (coda_cut_begin(&cutter, &plan->tables, allocator))
    return -1;
  cut_tables(plan, &cutter);
  return 0;
}

static coda_code read_string(const raw_tables *raw, uint32_t offset, const char **text, coda_error *error) {
  if (offset >= raw->string_bytes)
    return BAD("a string at byte %" PRIu32 " of %" PRIu32, offset, raw->string_bytes);
  *text = raw->strings + offset;
  return CODA_OK;
}

static coda_code read_names(const raw_tables *raw, const uint8_t *table, uint32_t count, const char **names,
                            coda_error *error) {
  for (uint32_t i = 0; i < count; i++)
    if (read_string(raw, coda_u32(table + WORD * (size_t)i), &names[i], error))
      return CODA_ERROR_BUNDLE;
  return CODA_OK;
}

/* A range of the word table, each word below `limit`. */
static coda_code read_words(const coda_plan *plan, uint32_t first, uint32_t count, uint32_t limit, const char *what,
                            const uint32_t **words, coda_error *error) {
  if (first > plan->word_count || count > plan->word_count - first)
    return BAD("%s are words %" PRIu32 " and %" PRIu32 " more of %" PRIu32, what, first, count, plan->word_count);
  *words = plan->words + first;
  for (uint32_t i = 0; i < count; i++)
    if ((*words)[i] >= limit)
      return BAD("%s name entry %" PRIu32 " of %" PRIu32, what, (*words)[i], limit);
  return CODA_OK;
}

static coda_code check_entry(uint32_t index, uint32_t limit, const char *what, coda_error *error) {
  return index < limit ? CODA_OK : BAD("%s is entry %" PRIu32 " of %" PRIu32, what, index, limit);
}

static uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* The phases, and the reads as far as buffers are not needed. */
static coda_code read_reads(coda_plan *plan, const raw_tables *raw, coda_error *error) {
  plan->phase_count = 1;
  for (uint32_t i = 0; i < plan->read_count; i++) {
    const uint8_t *p = raw->reads + READ * (size_t)i;
    plan_read *r = &plan->reads[i];
    *r = (plan_read){.step = coda_u32(p + 4),
                     .buffer = coda_u32(p + 8),
                     .dtype = (int32_t)coda_u32(p + 12),
                     .element = coda_u64(p + 16)};
    if (read_string(raw, coda_u32(p), &r->name, error))
      return CODA_ERROR_BUNDLE;
    if (r->step >= plan->step_count || (i && r->step < plan->reads[i - 1].step))
      return BAD("size '%s' is read before step %" PRIu32 " of %" PRIu32 ", or out of order", r->name, r->step,
                 plan->step_count);
    if (r->buffer >= plan->buffer_count || (r->dtype != CODA_INT32 && r->dtype != CODA_INT64))
      return BAD("size '%s' is of type %" PRId32 " in buffer %" PRIu32 " of %" PRIu32, r->name, r->dtype, r->buffer,
                 plan->buffer_count);
    if (i == 0 || r->step != plan->reads[i - 1].step)
      plan->phases[plan->phase_count++] = r->step;
    r->phase = plan->phase_count - 1;
  }
  plan->phases[plan->phase_count] = plan->step_count;
  return CODA_OK;
}

static uint32_t phase_of_step(const coda_plan *plan, uint32_t step) {
  uint32_t phase = 0, end = plan->phase_count;
  while (end - phase > 1) {
    const uint32_t middle = phase + (end - phase) / 2;
    if (plan->phases[middle] <= step)
      phase = middle;
    else
      end = middle;
  }
  return phase;
}

/* A read gets a value that an earlier phase has computed, from memory that still holds it. */
static coda_code check_reads(const coda_plan *plan, coda_error *error) {
  for (uint32_t i = 0; i < plan->read_count; i++) {
    const plan_read *r = &plan->reads[i];
    const plan_buffer *b = &plan->buffers[r->buffer];
    const bool computed = (b->kind == BUFFER_ARENA && b->first < r->step && b->last + 1 >= r->step) ||
                          (b->kind == BUFFER_OUTPUT && b->phase < r->phase);
    if (b->kind != BUFFER_INPUT && !computed)
      return BAD("size '%s' is read from buffer %" PRIu32 ", which does not hold it", r->name, r->buffer);
  }
  return CODA_OK;
}

static uint32_t phase_of(const plan_expr *e, const coda_plan *plan) {
  switch (e->op) {
  case EXPR_CONST:
  case EXPR_SYMBOL: return 0;
  case EXPR_DATA: return plan->reads[e->a].phase;
  case EXPR_RUN: return NEVER;
  default: return greater(plan->exprs[e->a].phase, plan->exprs[e->b].phase);
  }
}

static coda_code read_exprs(coda_plan *plan, const raw_tables *raw, coda_error *error) {
  for (uint32_t i = 0; i < plan->expr_count; i++) {
    const uint8_t *p = raw->exprs + EXPR * (size_t)i;
    plan_expr *e = &plan->exprs[i];
    *e = (plan_expr){coda_u32(p), 0, (int64_t)coda_u64(p + 8), (int64_t)coda_u64(p + 16)};
    if (e->op >= EXPR_OPS || coda_u32(p + 4) != 0)
      return BAD("size entry %" PRIu32 " has operator %" PRIu32, i, e->op);
    const bool number = e->op == EXPR_CONST || e->op == EXPR_RUN, name = e->op == EXPR_SYMBOL || e->op == EXPR_DATA;
    const int64_t limit = e->op == EXPR_SYMBOL ? plan->symbol_count : e->op == EXPR_DATA ? plan->read_count : i;
    if (!number && (e->a < 0 || e->a >= limit || (!name && (e->b < 0 || e->b >= limit))))
      return BAD("size entry %" PRIu32 " has an operand that is not before it", i);
    e->phase = phase_of(e, plan);
    if (e->op == EXPR_FLOORDIV || e->op == EXPR_MOD) {
      const plan_expr *divisor = &plan->exprs[e->b];
      if (divisor->op == EXPR_CONST && divisor->a <= 0)
        return BAD("size entry %" PRIu32 " divides by %" PRId64, i, divisor->a);
    }
  }
  return CODA_OK;
}

static coda_code read_tensors(coda_plan *plan, const raw_tables *raw, coda_error *error) {
  for (uint32_t i = 0; i < plan->input_count + plan->output_count; i++) {
    const uint8_t *p = raw->tensors + TENSOR * (size_t)i;
    const bool input = i < plan->input_count;
    plan_tensor *t = input ? &plan->inputs[i] : &plan->outputs[i - plan->input_count];
    t->dtype = (int32_t)coda_u32(p + 4);
    t->rank = coda_u32(p + 8);
    if (read_string(raw, coda_u32(p), &t->name, error))
      return CODA_ERROR_BUNDLE;
    if (coda_dtype_size(t->dtype) == 0)
      return BAD("tensor '%s' has element type %" PRId32, t->name, t->dtype);
    if (t->rank > CODA_MAX_RANK)
      return BAD("tensor '%s' has %" PRIu32 " dimensions, at most %d can be", t->name, t->rank, CODA_MAX_RANK);
    if (read_words(plan, coda_u32(p + 12), t->rank, plan->expr_count, "a tensor's dimensions", &t->dims, error))
      return CODA_ERROR_BUNDLE;
    for (uint32_t axis = 0; axis < t->rank; axis++)
      t->phase = greater(t->phase, plan->exprs[t->dims[axis]].phase);
    if (t->phase >= (input ? 1 : plan->phase_count))
      return BAD("tensor '%s' has a dimension that is not known when it must be", t->name);
    if (input)
      plan->dim_count += t->rank;
  }
  return CODA_OK;
}

/* A constant's size must be a number: it is checked here, once, against the constants section or what is repacked. */
static coda_code check_constant(coda_plan *plan, const plan_buffer *b, uint32_t i, size_t constant_bytes,
                                coda_error *error) {
  const plan_expr *size = &plan->exprs[b->size];
  if (size->op != EXPR_CONST || size->a < 0)
    return BAD("constant buffer %" PRIu32 " has no fixed size", i);
  if (b->index % CONSTANT_ALIGNMENT != 0)
    return BAD("constant buffer %" PRIu32 " is at byte %" PRIu64 ", not a multiple of %d", i, b->index,
               CONSTANT_ALIGNMENT);
  const size_t limit = b->kind == BUFFER_CONSTANT ? constant_bytes : SIZE_MAX / 2;
  if (b->index > limit || (uint64_t)size->a > limit - b->index)
    return BAD("constant buffer %" PRIu32 " ends beyond the %zu bytes of constants", i, limit);
  if (b->kind == BUFFER_REPACKED && b->index + (uint64_t)size->a > plan->repacked_bytes)
    plan->repacked_bytes = (size_t)(b->index + (uint64_t)size->a);
  return CODA_OK;
}

static coda_code read_buffers(coda_plan *plan, const raw_tables *raw, size_t constant_bytes, coda_error *error) {
  for (uint32_t i = 0; i < plan->buffer_count; i++) {
    const uint8_t *p = raw->buffers + BUFFER * (size_t)i;
    plan_buffer *b = &plan->buffers[i];
    *b = (plan_buffer){coda_u32(p), coda_u32(p + 4), coda_u64(p + 8), coda_u32(p + 16), coda_u32(p + 20), 0};
    if (b->kind >= BUFFER_KINDS || b->kind == BUFFER_STATE)
      return BAD("buffer %" PRIu32 " is of kind %" PRIu32 ", which this runtime does not know", i, b->kind);
    if (check_entry(b->size, plan->expr_count, "a buffer's size", error))
      return CODA_ERROR_BUNDLE;
    coda_code code = CODA_OK;
    if (b->kind == BUFFER_CONSTANT || b->kind == BUFFER_REPACKED)
      code = check_constant(plan, b, i, constant_bytes, error);
    else if (b->kind == BUFFER_ARENA && (b->first > b->last || b->last >= plan->step_count))
      code = BAD("buffer %" PRIu32 " lives from step %" PRIu32 " to %" PRIu32 " of %" PRIu32, i, b->first, b->last,
                 plan->step_count);
    else if (b->kind == BUFFER_INPUT && b->index >= plan->input_count)
      code = BAD("buffer %" PRIu32 " is input %" PRIu64 " of %" PRIu32, i, b->index, plan->input_count);
    else if (b->kind == BUFFER_OUTPUT && b->index >= plan->output_count)
      code = BAD("buffer %" PRIu32 " is output %" PRIu64 " of %" PRIu32, i, b->index, plan->output_count);
    if (code)
      return code;
    if (b->kind == BUFFER_ARENA)
      b->phase = phase_of_step(plan, b->first);
    else if (b->kind == BUFFER_OUTPUT)
      b->phase = plan->outputs[b->index].phase;
    if (plan->exprs[b->size].phase > b->phase)
      return BAD("buffer %" PRIu32 " has a size that is not known when it is needed", i);
  }
  return CODA_OK;
}

/* Every byte of repacked constants but the gaps between them is written by one move: there are as many as moves write.
 */
static coda_code read_moves(coda_plan *plan, const raw_tables *raw, size_t constant_bytes, coda_error *error) {
  uint64_t moved = 0;
  for (uint32_t i = 0; i < plan->move_count; i++) {
    const uint8_t *p = raw->moves + MOVE * (size_t)i;
    plan_move *m = &plan->moves[i];
    *m = (plan_move){coda_u64(p),      coda_u64(p + 8),  coda_u32(p + 16),
                     coda_u32(p + 20), coda_u32(p + 24), coda_u32(p + 28)};
    if (m->rows == 0 || m->row_bytes == 0 || m->row_bytes > m->from_stride || m->row_bytes > m->to_stride)
      return BAD("move %" PRIu32 " has rows that overlap, or none", i);
    const uint64_t last = m->rows - 1; /* the bytes from the first row to the end of the last one: */
    const uint64_t from = last * m->from_stride + m->row_bytes, to = last * m->to_stride + m->row_bytes;
    if (from > constant_bytes || m->from > constant_bytes - from)
      return BAD("move %" PRIu32 " reads beyond the %zu bytes of constants", i, constant_bytes);
    if (to > plan->repacked_bytes || m->to > plan->repacked_bytes - to)
      return BAD("move %" PRIu32 " writes beyond the %zu bytes of repacked constants", i, plan->repacked_bytes);
    moved += (uint64_t)m->rows * m->row_bytes; /* cannot overflow: it is refused as soon as it is too large */
    if (moved > plan->repacked_bytes)
      return BAD("move %" PRIu32 " writes what another one has written", i);
  }
  uint64_t gaps = 0;
  for (uint32_t i = 0; i < plan->buffer_count; i++)
    gaps += plan->buffers[i].kind == BUFFER_REPACKED ? CONSTANT_ALIGNMENT : 0;
  if (plan->repacked_bytes > moved + gaps)
    return BAD("it has %zu bytes of repacked constants, of which moves write %" PRIu64, plan->repacked_bytes, moved);
  return CODA_OK;
}

static coda_code read_step(coda_plan *plan, const raw_tables *raw, uint32_t i, coda_error *error) {
  const uint8_t *p = raw->steps + STEP * (size_t)i;
  uint32_t f[STEP / WORD];
  for (size_t k = 0; k < STEP / WORD; k++)
    f[k] = coda_u32(p + WORD * k);
  plan_step *s = &plan->steps[i];
  *s = (plan_step){.kernel = f[1],
                   .finish = (int32_t)f[2],
                   .buffer_count = f[4],
                   .int_count = f[6],
                   .items = f[7],
                   .grain = f[8],
                   .scratch = f[9],
                   .flops = f[10],
                   .bytes = f[11],
                   .phase = phase_of_step(plan, i)};
  if (read_string(raw, f[0], &s->name, error) || read_string(raw, f[12], &s->source, error) ||
      read_words(plan, f[3], f[4], plan->buffer_count, "a step's buffers", &s->buffers, error) ||
      read_words(plan, f[5], f[6], plan->expr_count, "a step's sizes", &s->ints, error) ||
      check_entry(s->kernel, plan->kernel_count, "a step's kernel", error) ||
      check_entry(s->items, plan->expr_count, "a step's items", error) ||
      check_entry(s->scratch, plan->expr_count, "a step's scratch", error) ||
      check_entry(s->flops, plan->expr_count, "a step's flops", error) ||
      check_entry(s->bytes, plan->expr_count, "a step's bytes", error))
    return CODA_ERROR_BUNDLE;
  if (s->finish < -1 || (s->finish >= 0 && (uint32_t)s->finish >= plan->kernel_count))
    return BAD("step '%s' finishes by kernel %" PRId32 " of %" PRIu32, s->name, s->finish, plan->kernel_count);
  if (s->grain == 0 || f[13] != 0)
    return BAD("step '%s' has grain %" PRIu32 " and reserved field %" PRIu32, s->name, s->grain, f[13]);
  for (uint32_t k = 0; k < s->buffer_count; k++) {
    const plan_buffer *b = &plan->buffers[s->buffers[k]];
    if (b->phase > s->phase || (b->kind == BUFFER_ARENA && (i < b->first || i > b->last)))
      return BAD("step '%s' uses buffer %" PRIu32 " outside its life", s->name, s->buffers[k]);
  }
  uint32_t phase = greater(plan->exprs[s->items].phase, plan->exprs[s->scratch].phase);
  phase = greater(phase, greater(plan->exprs[s->flops].phase, plan->exprs[s->bytes].phase));
  for (uint32_t k = 0; k < s->int_count; k++) {
    const plan_expr *e = &plan->exprs[s->ints[k]];
    if (e->op == EXPR_RUN)
      plan->run_count++;
    else
      phase = greater(phase, e->phase);
  }
  if (phase > s->phase)
    return BAD("step '%s' has a size that is not known when it is run", s->name);
  if (s->buffer_count > MAX_OPERANDS - plan->operand_count || s->int_count > MAX_OPERANDS - plan->int_count)
    return BAD("its steps have more than %d buffers or sizes", MAX_OPERANDS);
  plan->operand_count += s->buffer_count;
  plan->int_count += s->int_count;
  plan->max_operands = greater(plan->max_operands, s->buffer_count);
  plan->max_ints = greater(plan->max_ints, s->int_count);
  return CODA_OK;
}

static coda_code read_constraints(coda_plan *plan, const raw_tables *raw, coda_error *error) {
  for (uint32_t i = 0; i < plan->constraint_count; i++) {
    const uint8_t *p = raw->constraints + CONSTRAINT * (size_t)i;
    plan_constraint *c = &plan->constraints[i];
    *c = (plan_constraint){.relation = coda_u32(p), .left = coda_u32(p + 4), .right = coda_u32(p + 8)};
    if (c->relation >= RELATIONS)
      return BAD("constraint %" PRIu32 " has relation %" PRIu32, i, c->relation);
    if (check_entry(c->left, plan->expr_count, "a constraint's left side", error) ||
        check_entry(c->right, plan->expr_count, "a constraint's right side", error) ||
        read_string(raw, coda_u32(p + 12), &c->text, error))
      return CODA_ERROR_BUNDLE;
    c->phase = greater(plan->exprs[c->left].phase, plan->exprs[c->right].phase);
    if (c->phase >= plan->phase_count)
      return BAD("constraint %" PRIu32 " is of a size that is never known", i);
  }
  return CODA_OK;
}

/* Each symbol takes its value from the first input dimension that is exactly that symbol. */
static coda_code bind_symbols(coda_plan *plan, coda_error *error) {
  enum { UNBOUND = 0xffffffffu };
  for (uint32_t s = 0; s < plan->symbol_count; s++)
    plan->bindings[s].input = UNBOUND;
  for (uint32_t i = 0; i < plan->input_count; i++)
    for (uint32_t axis = 0; axis < plan->inputs[i].rank; axis++) {
      const plan_expr *e = &plan->exprs[plan->inputs[i].dims[axis]];
      if (e->op == EXPR_SYMBOL && plan->bindings[e->a].input == UNBOUND)
        plan->bindings[e->a] = (plan_binding){i, axis};
    }
  for (uint32_t s = 0; s < plan->symbol_count; s++)
    if (plan->bindings[s].input == UNBOUND)
      return BAD("no input has a dimension that is '%s'", plan->symbols[s]);
  return CODA_OK;
}

static coda_code parse(coda_plan *plan, const uint8_t *data, size_t size, size_t constant_bytes,
                       const coda_allocator *allocator, coda_error *error) {
  raw_tables raw;
  if (locate(plan, &raw, data, size, error))
    return CODA_ERROR_BUNDLE;
  if (allocate(plan, allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a plan of %zu bytes", size);
  for (uint32_t i = 0; i < plan->word_count; i++)
    plan->words[i] = coda_u32(raw.words + WORD * (size_t)i);
  if (read_names(&raw, raw.symbols, plan->symbol_count, plan->symbols, error) ||
      read_names(&raw, raw.kernels, plan->kernel_count, plan->kernels, error) || read_reads(plan, &raw, error) ||
      read_exprs(plan, &raw, error) || read_tensors(plan, &raw, error) ||
      read_buffers(plan, &raw, constant_bytes, error) || read_moves(plan, &raw, constant_bytes, error) ||
      read_constraints(plan, &raw, error))
    return CODA_ERROR_BUNDLE;
  for (uint32_t i = 0; i < plan->step_count; i++)
    if (read_step(plan, &raw, i, error))
      return CODA_ERROR_BUNDLE;
  return check_reads(plan, error) ? CODA_ERROR_BUNDLE : bind_symbols(plan, error);
}

coda_code coda_plan_parse(coda_plan *plan, const uint8_t *data, size_t size, size_t constant_bytes,
                          const coda_allocator *allocator, coda_error *error) {
  memset(plan, 0, sizeof *plan);
  coda_code code = parse(plan, data, size, constant_bytes, allocator, error);
  if (code)
    coda_plan_free(plan, allocator);
  return code;
}

void coda_plan_free(coda_plan *plan, const coda_allocator *allocator) {
  coda_block_free(&plan->tables, allocator);
  memset(plan, 0, sizeof *plan);
}
