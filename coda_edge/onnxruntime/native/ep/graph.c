/* Reading onnxruntime's graphs. */
#include <stdlib.h>

#include "provider.h"

typedef OrtStatus *(*count_function)(const OrtNode *, size_t *);
typedef OrtStatus *(*list_function)(const OrtNode *, const OrtValueInfo **, size_t);

static OrtStatus *read_values(const host *api, const OrtNode *node, count_function count, list_function list,
                              values *result) {
  *result = (values){NULL, 0};
  size_t number;
  TRY(count(node, &number));
  const OrtValueInfo **items = calloc(number + 1, sizeof(const OrtValueInfo *));
  if (!items)
    return status_new(api->ort, ORT_FAIL, "no memory for the values of a node");
  OrtStatus *status = number ? list(node, items, number) : NULL;
  if (status) {
    free(items);
    return status;
  }
  *result = (values){items, number};
  return NULL;
}

OrtStatus *node_inputs(const host *api, const OrtNode *node, values *result) {
  return read_values(api, node, api->ort->Node_GetNumInputs, api->ort->Node_GetInputs, result);
}

OrtStatus *node_implicit_inputs(const host *api, const OrtNode *node, values *result) {
  return read_values(api, node, api->ort->Node_GetNumImplicitInputs, api->ort->Node_GetImplicitInputs, result);
}

OrtStatus *node_outputs(const host *api, const OrtNode *node, values *result) {
  return read_values(api, node, api->ort->Node_GetNumOutputs, api->ort->Node_GetOutputs, result);
}

OrtStatus *value_name(const host *api, const OrtValueInfo *value, const char **name) {
  *name = "";
  return value ? api->ort->GetValueInfoName(value, name) : NULL;
}

OrtStatus *graph_nodes(const host *api, const OrtGraph *graph, const OrtNode ***nodes, size_t *count) {
  *nodes = NULL;
  TRY(api->ort->Graph_GetNumNodes(graph, count));
  const OrtNode **list = calloc(*count + 1, sizeof(const OrtNode *));
  if (!list)
    return status_new(api->ort, ORT_FAIL, "no memory for the nodes of a graph");
  OrtStatus *status = *count ? api->ort->Graph_GetNodes(graph, list, *count) : NULL;
  if (status)
    free(list);
  else
    *nodes = list;
  return status;
}
