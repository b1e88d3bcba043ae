/* The plan of a bundle in memory: tables whose every index has been checked. */
#ifndef CODA_PLAN_H
#define CODA_PLAN_H

#include "error.h"
#include "memory.h"

enum { CODA_MAX_SYMBOLS = 256 };

typedef enum {
  EXPR_CONST,
  EXPR_SYMBOL,
  EXPR_ADD,
  EXPR_MUL,
  EXPR_FLOORDIV,
  EXPR_MOD,
  EXPR_MAX,
  EXPR_MIN,
  EXPR_DATA,
  EXPR_RUN,
  EXPR_OPS
} expr_op;

/* A plan whose sizes follow from the inputs' shapes has one phase. Where data decides a size, a new phase begins with
 * the first step that comes after it is read: an entry's phase is the first in which it is known. */
enum { NEVER = 0xffffffffu }; /* the phase of an entry that is no size */

typedef struct {
  uint32_t op, phase;
  int64_t a, b; /* a CONST's value, the index of a SYMBOL or of a DATA's read, else earlier entries */
} plan_expr;

typedef struct {
  const char *name;
  int32_t dtype;
  uint32_t rank;
  uint32_t phase; /* in which its dimensions are known */
  const uint32_t *dims; /* rank entries of the size table */
} plan_tensor;

typedef enum {
  BUFFER_INPUT,
  BUFFER_OUTPUT,
  BUFFER_CONSTANT,
  BUFFER_ARENA,
  BUFFER_STATE, /* reserved */
  BUFFER_REPACKED,
  BUFFER_KINDS
} buffer_kind;

typedef struct {
  uint32_t kind;
  uint32_t size; /* entry of the size table: bytes */
  uint64_t index; /* of the input or output; byte offset of a constant or a repacked one */
  uint32_t first, last;
  uint32_t phase; /* in which it gets its memory: that of its first step, of its output */
} plan_buffer;

typedef struct {
  const char *name, *source;
  uint32_t kernel;
  int32_t finish; /* -1: none */
  const uint32_t *buffers, *ints;
  uint32_t buffer_count, int_count;
  uint32_t grain;
  uint32_t items, scratch, flops, bytes; /* entries of the size table */
  uint32_t phase;
} plan_step;

typedef enum { RELATION_AT_MOST, RELATION_EQUAL, RELATIONS } plan_relation;

/* What must hold of two sizes for the plan to be right; `text` says why. */
typedef struct {
  uint32_t relation, left, right, phase;
  const char *text;
} plan_constraint;

/* A size that data decides: an element of an int32 or int64 buffer, read when the steps before `step` are done. */
typedef struct {
  const char *name;
  uint32_t step, buffer, phase; /* the phase that it begins */
  int32_t dtype;
  uint64_t element;
} plan_read;

/* Rows of constants that are copied to where repacked ones lie. */
typedef struct {
  uint64_t from, to;
  uint32_t row_bytes, rows, from_stride, to_stride;
} plan_move;

/* The input dimension that gives a symbol its value. */
typedef struct {
  uint32_t input, axis;
} plan_binding;

typedef struct {
  uint32_t symbol_count, expr_count, input_count, output_count, buffer_count, kernel_count, step_count, word_count,
      constraint_count, read_count, move_count, phase_count;
  const char **symbols;
  plan_binding *bindings; /* by symbol */
  plan_expr *exprs;
  plan_tensor *inputs, *outputs;
  plan_buffer *buffers;
  const char **kernels;
  plan_step *steps;
  plan_constraint *constraints;
  plan_read *reads; /* ordered by step */
  plan_move *moves;
  size_t repacked_bytes;
  uint32_t *phases; /* the first step of each, and behind the last the number of steps */
  uint32_t *words; /* what the dims, buffers and ints above point into */
  uint32_t dim_count; /* of all inputs together */
  uint32_t operand_count, int_count; /* of all steps together */
  uint32_t max_operands, max_ints; /* of one step */
  coda_block tables; /* what the pointers above point into */
  uint32_t run_count; /* ints that are the run's number */
} coda_plan;

/* Reads the plan section. Strings point into `data`. On failure the plan is empty. */
coda_code coda_plan_parse(coda_plan *plan, const uint8_t *data, size_t size, size_t constant_bytes,
                          const coda_allocator *allocator, coda_error *error);

void coda_plan_free(coda_plan *plan, const coda_allocator *allocator);

/* Computes the entries of the size table that are first known in `phase`; `data` holds what was read. */
coda_code coda_plan_evaluate(const coda_plan *plan, uint32_t phase, const int64_t *symbols, const int64_t *data,
                             int64_t *values, coda_error *error);

/* Writes entry `index` as text, such as "past + seq"; an expression too long for `capacity` ends in "...". */
void coda_plan_format(const coda_plan *plan, uint32_t index, char *text, size_t capacity);

#endif
