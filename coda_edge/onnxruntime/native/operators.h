/* What one model's operators are: constant tables, written for the model, of which everything else in this folder is
 * the interpreter. */
#ifndef CODA_OPERATORS_H
#define CODA_OPERATORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ort_api.h"

enum {
  MAX_RANK = 8,
  MAX_TENSORS = 48, /* inputs and outputs of an operator */
  MAX_OPERANDS = 64, /* of a kernel, its scratch aside */
  MAX_INTS = 96, /* of a kernel, begin and end aside */
  MAX_SIZES = 512,
  ALIGNMENT = 64,
};

/* The size table, as docs/bundle-format.md has it; a SYMBOL is a dimension of an input. */
enum { EXPR_CONST, EXPR_SYMBOL, EXPR_ADD, EXPR_MUL, EXPR_FLOORDIV, EXPR_MOD, EXPR_MAX, EXPR_MIN };
typedef struct {
  uint32_t op;
  int64_t a, b;
} coda_size;

typedef struct {
  uint32_t input, axis;
} coda_symbol;

typedef struct {
  const char *name;
  int type; /* ONNX's number */
  uint32_t rank;
  const uint32_t *dims; /* sizes */
} coda_tensor;

typedef enum { FROM_INPUT, FROM_OUTPUT, FROM_WORKSPACE, FROM_CONSTANT, FROM_WEIGHT } coda_origin;
typedef struct {
  coda_origin origin;
  uint32_t index;
} coda_operand;

typedef int32_t (*coda_function)(const uint64_t *buffers, const int64_t *ints);
typedef struct {
  const char *name;
  coda_function kernel, finish; /* finish may be NULL */
  const coda_operand *operands;
  uint32_t operand_count;
  const uint32_t *ints; /* sizes */
  uint32_t int_count;
  uint32_t items, scratch; /* sizes */
  int64_t grain;
} coda_step;

/* A constant that the library holds for a node, which asks for it by digest. */
typedef struct {
  const char *digest;
  const void *data;
  uint64_t bytes;
} coda_weight;

typedef struct {
  bool equal; /* left = right, or else left <= right */
  uint32_t left, right; /* sizes */
  const char *text;
} coda_constraint;

typedef struct {
  const char *name;
  const coda_tensor *inputs, *outputs;
  uint32_t input_count, output_count;
  const coda_symbol *symbols;
  uint32_t symbol_count;
  const coda_size *sizes;
  uint32_t size_count;
  const uint32_t *workspaces; /* sizes, in bytes */
  uint32_t workspace_count;
  const void *const *constants;
  const uint64_t *weights; /* bytes of each */
  uint32_t weight_count;
  const coda_step *steps;
  uint32_t step_count;
  const coda_constraint *constraints;
  uint32_t constraint_count;
} coda_operator;

typedef struct {
  OrtCustomOp base;
  const coda_operator *op;
} coda_custom_op;

/* The model's own. */
extern const coda_operator CODA_OPERATORS[];
extern const uint32_t CODA_OPERATOR_COUNT;
extern coda_custom_op CODA_CUSTOM_OPS[]; /* one for each operator, to be filled */
extern const coda_weight CODA_WEIGHTS[]; /* up to one without a digest */
extern const char *const CODA_FEATURES[]; /* of the CPU, up to a NULL */

/* A status of `code` with a message. */
OrtStatus *coda_fail(const OrtApi *api, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Computes every size whose symbols are known; `known` may be NULL: all are. Returns 0, or the number of an entry that
   divides by less than one or is beyond 64 bits, plus one. */
uint32_t coda_sizes(const coda_operator *op, const int64_t *symbols, const bool *known, int64_t *values, bool *found);

/* OrtCustomOp's functions of a kernel. */
OrtStatus *coda_kernel_create(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **);
OrtStatus *coda_kernel_compute(void *, OrtKernelContext *);
void coda_kernel_destroy(void *);

/* Tells output shapes from input shapes; `api` of the process. */
OrtStatus *coda_infer_shapes(const OrtApi *api, const coda_operator *op, const OrtShapeInferContext *);

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    OrtStatus *status_ = (call);                                                                                       \
    if (status_)                                                                                                       \
      return status_;                                                                                                  \
  } while (0)

#endif
