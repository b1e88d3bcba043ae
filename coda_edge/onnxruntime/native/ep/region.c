/* Finds in a graph the nodes that a bundle computes: those on the way from its inputs to its outputs, by these values'
 * names. onnxruntime has rewritten some of the nodes by then; what values are called, it mostly keeps. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

typedef struct {
  const host *api;
  const bundle *bundle;
  char *reason;
  const OrtNode **nodes; /* of the graph */
  size_t count, ids;
  size_t *place; /* by id, the number of a node in `nodes` */
  bool *taken; /* by that number */
  bool *met; /* by number, the bundle's inputs that are read */
  size_t *pending; /* taken, but not visited yet */
  size_t pending_count;
  region *found;
} search;

__attribute__((format(printf, 2, 3))) static void refuse(search *s, const char *format, ...) {
  if (*s->reason)
    return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(s->reason, REASON_BYTES, format, arguments);
  va_end(arguments);
}

static OrtStatus *no_memory(const search *s) { return status_new(s->api->ort, ORT_FAIL, "no memory to read a graph"); }

/* The number of a node; `count` for one of another graph. */
static OrtStatus *find_place(const search *s, const OrtNode *node, size_t *place) {
  size_t id;
  TRY(s->api->ort->Node_GetId(node, &id));
  *place = id < s->ids ? s->place[id] : s->count;
  return NULL;
}

static OrtStatus *prepare(search *s, const OrtGraph *graph) {
  const OrtApi *ort = s->api->ort;
  TRY(graph_nodes(s->api, graph, &s->nodes, &s->count));
  for (size_t i = 0; i < s->count; i++) {
    size_t id;
    TRY(ort->Node_GetId(s->nodes[i], &id));
    s->ids = id >= s->ids ? id + 1 : s->ids;
  }
  s->place = malloc((s->ids + 1) * sizeof *s->place);
  s->taken = calloc(s->count + 1, sizeof *s->taken);
  s->pending = malloc((s->count + 1) * sizeof *s->pending);
  s->met = calloc(coda_model_input_count(s->bundle->model) + 1, sizeof *s->met);
  s->found->nodes = malloc((s->count + 1) * sizeof(const OrtNode *));
  if (!s->place || !s->taken || !s->pending || !s->met || !s->found->nodes)
    return no_memory(s);
  for (size_t id = 0; id < s->ids; id++)
    s->place[id] = s->count;
  for (size_t i = 0; i < s->count; i++) {
    size_t id;
    TRY(ort->Node_GetId(s->nodes[i], &id));
    s->place[id] = i;
  }
  return NULL;
}

static OrtStatus *take(search *s, const OrtNode *node) {
  size_t place;
  TRY(find_place(s, node, &place));
  if (place < s->count && !s->taken[place]) {
    s->taken[place] = true;
    s->pending[s->pending_count++] = place;
    s->found->nodes[s->found->count++] = node;
  }
  return NULL;
}

/* Compares what a value and a bundle's tensor of that name are. Of outputs only the type: some models declare
 * dimensions that they do not have. */
static OrtStatus *compare(search *s, const OrtValueInfo *value, const coda_tensor_info *info, bool output) {
  const OrtApi *ort = s->api->ort;
  const OrtTypeInfo *type = NULL;
  const OrtTensorTypeAndShapeInfo *tensor = NULL;
  TRY(ort->GetValueInfoTypeInfo(value, &type));
  if (type)
    TRY(ort->CastTypeInfoToTensorInfo(type, &tensor));
  if (!tensor)
    return NULL;
  int dtype;
  size_t rank;
  int64_t dims[CODA_MAX_RANK];
  TRY(ort->GetTensorElementType(tensor, &dtype));
  if (dtype != info->dtype)
    refuse(s, "'%s' is %s in the model, the bundle was compiled for %s", info->name, coda_dtype_name(dtype),
           coda_dtype_name(info->dtype));
  TRY(ort->GetDimensionsCount(tensor, &rank));
  if (output || rank == 0 || rank > CODA_MAX_RANK) /* 0: a scalar, or nothing is known */
    return NULL;
  TRY(ort->GetDimensions(tensor, dims, rank));
  if ((int32_t)rank != info->rank)
    refuse(s, "'%s' has %zu dimensions in the model, the bundle was compiled for %d", info->name, rank,
           (int)info->rank);
  for (int32_t i = 0; i < info->rank && i < (int32_t)rank; i++)
    if (dims[i] >= 0 && info->dims[i] >= 0 && dims[i] != info->dims[i])
      refuse(s, "dimension %d of '%s' is %lld in the model, the bundle was compiled for %lld", (int)i, info->name,
             (long long)dims[i], (long long)info->dims[i]);
  return NULL;
}

/* Takes the nodes that make the bundle's outputs. */
static OrtStatus *take_outputs(search *s, bool *made) {
  for (size_t i = 0; i < s->count; i++) {
    values outputs;
    TRY(node_outputs(s->api, s->nodes[i], &outputs));
    OrtStatus *status = NULL;
    for (size_t k = 0; k < outputs.count && !status; k++) {
      const char *name = "";
      status = value_name(s->api, outputs.items[k], &name);
      const int output = status || !*name ? -1 : bundle_output(s->bundle, name);
      if (output < 0)
        continue;
      made[output] = true;
      status = compare(s, outputs.items[k], coda_model_output(s->bundle->model, (size_t)output), true);
      if (!status)
        status = take(s, s->nodes[i]);
    }
    free(outputs.items);
    TRY(status);
  }
  return NULL;
}

/* An output that no node makes may still be the graph's: one that onnxruntime knows without running anything. */
static OrtStatus *check_missing(search *s, const OrtGraph *graph, const bool *made) {
  size_t count;
  TRY(s->api->ort->Graph_GetNumOutputs(graph, &count));
  const OrtValueInfo **outputs = calloc(count + 1, sizeof(const OrtValueInfo *));
  if (!outputs)
    return no_memory(s);
  OrtStatus *status = count ? s->api->ort->Graph_GetOutputs(graph, outputs, count) : NULL;
  for (size_t i = 0; i < coda_model_output_count(s->bundle->model) && !status; i++) {
    const char *wanted = coda_model_output(s->bundle->model, i)->name;
    bool there = made[i];
    for (size_t k = 0; k < count && !there && !status; k++) {
      const char *name = "";
      status = value_name(s->api, outputs[k], &name);
      there = !status && strcmp(name, wanted) == 0;
    }
    if (!there && !status)
      refuse(s, "the bundle computes '%s', and the model has no value of that name", wanted);
  }
  free(outputs);
  return status;
}

static OrtStatus *keep_constant(search *s, const OrtValueInfo *value) {
  region *r = s->found;
  if ((r->constant_count & (r->constant_count + 1)) == 0) { /* full at 0, 1, 3, 7, … */
    const size_t capacity = 2 * r->constant_count + 1;
    const OrtValueInfo **grown = realloc(r->constants, capacity * sizeof(const OrtValueInfo *));
    if (!grown)
      return no_memory(s);
    r->constants = grown;
  }
  r->constants[r->constant_count++] = value;
  return NULL;
}

/* A value that a node of the region reads. */
static OrtStatus *follow(search *s, const OrtValueInfo *value) {
  const char *name;
  TRY(value_name(s->api, value, &name));
  if (!*name)
    return NULL;
  const int input = bundle_input(s->bundle, name);
  bool constant;
  TRY(s->api->ort->ValueInfo_IsConstantInitializer(value, &constant));
  if (input >= 0 && constant)
    refuse(s, "'%s' is an input of the bundle, and a constant of the model", name);
  if (input >= 0) {
    s->met[input] = true;
    return compare(s, value, coda_model_input(s->bundle->model, (size_t)input), false);
  }
  if (constant)
    return keep_constant(s, value);
  const OrtNode *producer = NULL;
  TRY(s->api->ort->ValueInfo_GetValueProducer(value, &producer, NULL));
  if (producer)
    return take(s, producer);
  refuse(s, "the model's outputs depend on '%s', which is no input of the bundle", name);
  return NULL;
}

static OrtStatus *follow_all(search *s, OrtStatus *(*read)(const host *, const OrtNode *, values *),
                             const OrtNode *node) {
  values inputs;
  TRY(read(s->api, node, &inputs));
  OrtStatus *status = NULL;
  for (size_t i = 0; i < inputs.count && !status; i++)
    status = follow(s, inputs.items[i]);
  free(inputs.items);
  return status;
}

/* Whether a value is read outside of the region. */
static OrtStatus *is_read_outside(const search *s, const OrtValueInfo *value, bool *outside) {
  const OrtApi *ort = s->api->ort;
  TRY(ort->ValueInfo_IsGraphOutput(value, outside));
  size_t count;
  TRY(ort->ValueInfo_GetValueNumConsumers(value, &count));
  const OrtNode **nodes = calloc(count + 1, sizeof(const OrtNode *));
  int64_t *places = calloc(count + 1, sizeof *places);
  OrtStatus *status = nodes && places ? NULL : no_memory(s);
  if (!status && count)
    status = ort->ValueInfo_GetValueConsumers(value, nodes, places, count);
  for (size_t i = 0; i < count && !status; i++) {
    size_t place;
    status = find_place(s, nodes[i], &place);
    if (!status && !(place < s->count && s->taken[place]))
      *outside = true;
  }
  free(nodes);
  free(places);
  return status;
}

/* What others read of the region must be an output of the bundle. */
static OrtStatus *check_outputs(search *s, const OrtNode *node) {
  values outputs;
  TRY(node_outputs(s->api, node, &outputs));
  OrtStatus *status = NULL;
  for (size_t i = 0; i < outputs.count && !status; i++) {
    const char *name = "";
    bool outside = false;
    status = value_name(s->api, outputs.items[i], &name);
    if (status || !*name || bundle_output(s->bundle, name) >= 0)
      continue;
    status = is_read_outside(s, outputs.items[i], &outside);
    if (outside)
      refuse(s, "the model needs '%s', which the bundle computes on the way but does not give", name);
  }
  free(outputs.items);
  return status;
}

static OrtStatus *run_search(search *s, const OrtGraph *graph) {
  bool *made = calloc(coda_model_output_count(s->bundle->model) + 1, sizeof *made);
  OrtStatus *status = made ? prepare(s, graph) : no_memory(s);
  if (!status)
    status = take_outputs(s, made);
  if (!status)
    status = check_missing(s, graph, made);
  free(made);
  while (!status && s->pending_count) {
    const OrtNode *node = s->nodes[s->pending[--s->pending_count]];
    status = follow_all(s, node_inputs, node);
    if (!status)
      status = follow_all(s, node_implicit_inputs, node);
  }
  for (size_t i = 0; i < coda_model_input_count(s->bundle->model) && !status; i++)
    if (!s->met[i] && s->found->count)
      refuse(
          s,
          "the bundle reads '%s', which nothing in onnxruntime's graph does: remove that input from the model, or set "
          "the graph optimization level to ORT_DISABLE_ALL",
          coda_model_input(s->bundle->model, i)->name);
  for (size_t i = 0; i < s->found->count && !status; i++)
    status = check_outputs(s, s->found->nodes[i]);
  s->found->whole = s->found->count == s->count;
  return status;
}

OrtStatus *region_find(const host *api, const OrtGraph *graph, const bundle *b, region *result,
                       char reason[REASON_BYTES]) {
  *result = (region){.whole = false};
  *reason = 0;
  search s = {.api = api, .bundle = b, .reason = reason, .found = result};
  OrtStatus *status = run_search(&s, graph);
  free(s.nodes);
  free(s.place);
  free(s.taken);
  free(s.pending);
  free(s.met);
  if (status || *reason)
    region_free(result);
  return status;
}

void region_free(region *r) {
  free(r->nodes);
  free(r->constants);
  *r = (region){.whole = false};
}
