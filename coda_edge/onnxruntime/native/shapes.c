/* Shape inference: what onnxruntime may know of outputs before a run. A size that nothing tells yet is left to the run.
 */
#include <string.h>

#include "operators.h"

typedef struct {
  int64_t dims[MAX_TENSORS][MAX_RANK]; /* negative: not known */
  const char *names[MAX_TENSORS][MAX_RANK];
  bool ranked[MAX_TENSORS];
} given_shapes;

static OrtStatus *read_input(const OrtApi *api, const coda_operator *op, const OrtShapeInferContext *context,
                             uint32_t i, given_shapes *given) {
  OrtTensorTypeAndShapeInfo *info; /* the context's own */
  size_t rank;
  TRY(api->ShapeInferContext_GetInputTypeShape(context, i, &info));
  TRY(api->GetDimensionsCount(info, &rank));
  if (rank != op->inputs[i].rank)
    return NULL;
  given->ranked[i] = true;
  if (rank == 0)
    return NULL;
  TRY(api->GetDimensions(info, given->dims[i], rank));
  return api->GetSymbolicDimensions(info, given->names[i], rank);
}

static OrtStatus *set_output(const OrtApi *api, const coda_operator *op, const OrtShapeInferContext *context,
                             uint32_t o, const given_shapes *given, const int64_t *values, const bool *found) {
  const coda_tensor *output = &op->outputs[o];
  int64_t dims[MAX_RANK];
  const char *names[MAX_RANK];
  for (uint32_t axis = 0; axis < output->rank; axis++) {
    const coda_size *size = &op->sizes[output->dims[axis]];
    dims[axis] = found[output->dims[axis]] ? values[output->dims[axis]] : -1;
    names[axis] = "";
    if (dims[axis] >= 0)
      continue;
    if (size->op != EXPR_SYMBOL)
      return NULL;
    const coda_symbol *symbol = &op->symbols[size->a];
    names[axis] = given->names[symbol->input][symbol->axis];
    if (!names[axis] || !*names[axis])
      return NULL;
  }
  OrtTensorTypeAndShapeInfo *info;
  TRY(api->CreateTensorTypeAndShapeInfo(&info));
  OrtStatus *status = api->SetTensorElementType(info, output->type);
  if (!status)
    status = api->SetDimensions(info, dims, output->rank);
  if (!status)
    status = api->SetSymbolicDimensions(info, names, output->rank);
  if (!status)
    status = api->ShapeInferContext_SetOutputTypeShape(context, o, info);
  api->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

OrtStatus *coda_infer_shapes(const OrtApi *api, const coda_operator *op, const OrtShapeInferContext *context) {
  given_shapes given;
  memset(&given, 0, sizeof given);
  int64_t symbols[MAX_SIZES], values[MAX_SIZES];
  bool known[MAX_SIZES], found[MAX_SIZES];
  size_t count;
  TRY(api->ShapeInferContext_GetInputCount(context, &count));
  if (count != op->input_count)
    return coda_fail(api, ORT_INVALID_ARGUMENT,
                     "coda::%s has %zu inputs, expected %u: use the model and the library of one build", op->name,
                     count, op->input_count);
  for (uint32_t i = 0; i < op->input_count; i++)
    TRY(read_input(api, op, context, i, &given));
  for (uint32_t i = 0; i < op->symbol_count; i++) {
    const coda_symbol *s = &op->symbols[i];
    symbols[i] = given.dims[s->input][s->axis];
    known[i] = given.ranked[s->input] && symbols[i] >= 0;
  }
  if (coda_sizes(op, symbols, known, values, found))
    return NULL;
  for (uint32_t o = 0; o < op->output_count; o++)
    TRY(set_output(api, op, context, o, &given, values, found));
  return NULL;
}
