/* The provider of a session: says which nodes its bundles compute, and gives for these what runs them.
 *
 * A bundle that was asked for and cannot be used is an error; onnxruntime only logs what GetCapability returns, so that
 * the refusal waits until Compile: for that, one node is claimed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

static const char *get_name(const OrtEp *self) { return ((const provider *)self)->name; }

static OrtStatus *claim(const provider *p, OrtEpGraphSupportInfo *support, const OrtNode **nodes, size_t count) {
  const OrtNodeFusionOptions options = {EP_API_USED, true};
  return p->api.ep->EpGraphSupportInfo_AddNodesToFuse(support, nodes, count, &options);
}

/* Claims what `b` computes; `reason` says why that is nothing, or is empty. */
static OrtStatus *claim_region(const provider *p, const OrtGraph *graph, OrtEpGraphSupportInfo *support,
                               const bundle *b, char reason[REASON_BYTES]) {
  region r;
  TRY(region_find(&p->api, graph, b, &r, reason));
  if (*reason)
    return NULL;
  OrtStatus *status = identity_check(p, graph, &r, b, reason);
  if (!status && !*reason && r.count) {
    status = claim(p, support, r.nodes, r.count);
    tell(p, ORT_LOG_INFO, "%s computes %zu nodes", b->path, r.count);
  }
  region_free(&r);
  return status;
}

/* Nodes of a context model; any other node of it is onnxruntime's. */
static OrtStatus *claim_contexts(const provider *p, OrtEpGraphSupportInfo *support, const OrtNode **nodes, size_t count,
                                 bool *any) {
  *any = false;
  for (size_t i = 0; i < count; i++) {
    bool ours;
    TRY(context_is(p, nodes[i], &ours));
    if (ours)
      TRY(claim(p, support, &nodes[i], 1));
    *any |= ours;
  }
  return NULL;
}

static OrtStatus *claim_bundles(provider *p, const OrtGraph *graph, OrtEpGraphSupportInfo *support,
                                const OrtNode **nodes) {
  char reason[REASON_BYTES] = "";
  for (const bundle *b = p->bundles; b && !*p->refusal; b = b->next) {
    TRY(claim_region(p, graph, support, b, reason));
    if (*reason) {
      snprintf(p->refusal, sizeof p->refusal,
               "the bundle '%.300s' was not compiled from this model: %.500s. Compile it from the model that is loaded "
               "(coda-edge optimize MODEL), or leave the option out",
               b->path, reason);
      return claim(p, support, nodes, 1);
    }
  }
  return NULL;
}

static OrtStatus *claim_just_in_time(provider *p, const OrtGraph *graph, OrtEpGraphSupportInfo *support) {
  const char *path = NULL;
  char reason[REASON_BYTES] = "";
  TRY(p->api.ort->Graph_GetModelPath(graph, &path));
  if (!path || !*path) {
    tell(p, ORT_LOG_WARNING,
         "nothing is computed here: the model came without a file's name, so that no bundle can be compiled for it. "
         "Load it from a file, or name a bundle in the option 'bundle'");
    return NULL;
  }
  if (!p->bundles)
    just_in_time(p, path);
  for (const bundle *b = p->bundles; b; b = b->next) {
    TRY(claim_region(p, graph, support, b, reason));
    if (*reason)
      tell(p, ORT_LOG_WARNING, "left to onnxruntime: %s: %s", b->path, reason);
  }
  return NULL;
}

static OrtStatus *get_capability(OrtEp *self, const OrtGraph *graph, OrtEpGraphSupportInfo *support) {
  provider *p = (provider *)self;
  const OrtNode *parent = NULL, **nodes;
  size_t count;
  bool contexts;
  TRY(p->api.ort->Graph_GetParentNode(graph, &parent));
  if (parent) /* a branch or body: bundles are of whole graphs */
    return NULL;
  TRY(graph_nodes(&p->api, graph, &nodes, &count));
  OrtStatus *status = claim_contexts(p, support, nodes, count, &contexts);
  if (!status && count && !contexts)
    status = p->settings.bundles ? claim_bundles(p, graph, support, nodes) : claim_just_in_time(p, graph, support);
  free(nodes);
  return status;
}

/* The bundle that has all outputs of a fused node. */
static OrtStatus *find_bundle(const provider *p, const OrtNode *fused, const bundle **result) {
  values outputs;
  TRY(node_outputs(&p->api, fused, &outputs));
  OrtStatus *status = NULL;
  *result = NULL;
  for (const bundle *b = p->bundles; b && !*result && !status; b = b->next) {
    bool all = true;
    for (size_t i = 0; i < outputs.count && !status; i++) {
      const char *name = "";
      status = value_name(&p->api, outputs.items[i], &name);
      all = all && bundle_output(b, name) >= 0;
    }
    *result = all ? b : NULL;
  }
  free(outputs.items);
  if (!status && !*result)
    status = status_new(p->api.ort, ORT_EP_FAIL, "no bundle computes what was claimed: this is a bug of coda-edge");
  return status;
}

static OrtStatus *compile_node(provider *p, const OrtGraph *graph, const OrtNode *fused, OrtNodeComputeInfo **info,
                               OrtNode **context) {
  const OrtNode **nodes;
  size_t count;
  bool ours = false;
  const bundle *b = NULL;
  TRY(graph_nodes(&p->api, graph, &nodes, &count));
  OrtStatus *status = count == 1 ? context_is(p, nodes[0], &ours) : NULL;
  if (!status && ours) {
    bundle *read;
    status = context_read(p, graph, nodes[0], &read);
    b = status ? NULL : read;
  } else if (!status) {
    status = find_bundle(p, fused, &b);
  }
  free(nodes);
  TRY(status);
  TRY(compute_create(p, fused, b, info));
  return p->settings.write_context && !ours ? context_write(p, graph, fused, b, context) : NULL;
}

static OrtStatus *compile(OrtEp *self, const OrtGraph **graphs, const OrtNode **fused, size_t count,
                          OrtNodeComputeInfo **infos, OrtNode **contexts) {
  provider *p = (provider *)self;
  if (*p->refusal)
    return p->api.ort->CreateStatus(ORT_EP_FAIL, p->refusal);
  for (size_t i = 0; i < count; i++)
    TRY(compile_node(p, graphs[i], fused[i], &infos[i], &contexts[i]));
  return NULL;
}

static void release_infos(OrtEp *self, OrtNodeComputeInfo **infos, size_t count) {
  (void)self;
  for (size_t i = 0; i < count; i++)
    if (infos[i])
      compute_free(infos[i]);
}

static OrtStatus *explain(const OrtApi *ort, OrtStatus *status) {
  OrtStatus *result = status_new(ort, ORT_FAIL,
                                 "the option 'bundle' names what cannot be used: %s. Compile the model again "
                                 "(coda-edge optimize MODEL -o BUNDLE), or leave the option out",
                                 ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  return result;
}

/* Opens the bundles that the option names. */
static OrtStatus *open_bundles(provider *p) {
  char *rest = p->settings.bundles, *path;
  while (rest && (path = strsep(&rest, ";"))) {
    bundle *opened;
    OrtStatus *status = *path ? bundle_open(p, path, &opened) : NULL;
    if (status)
      return explain(p->api.ort, status);
  }
  return NULL;
}

OrtStatus *provider_create(const host *api, const char *name, const OrtSessionOptions *options, const OrtLogger *logger,
                           OrtEp **result) {
  provider *p = calloc(1, sizeof *p);
  char *copy = strdup(name);
  if (!p || !copy) {
    free(p);
    free(copy);
    return status_new(api->ort, ORT_FAIL, "no memory for a provider");
  }
  p->api = *api;
  p->name = copy;
  p->logger = logger;
  p->base = (OrtEp){
      .ort_version_supported = EP_API_USED,
      .GetName = get_name,
      .GetCapability = get_capability,
      .Compile = compile,
      .ReleaseNodeComputeInfos = release_infos,
  };
  OrtStatus *status = settings_read(api, name, options, &p->settings);
  if (!status)
    status = open_bundles(p);
  if (status)
    provider_free(&p->base);
  else
    *result = &p->base;
  return status;
}

void provider_free(OrtEp *ep) {
  provider *p = (provider *)ep;
  if (!p)
    return;
  bundles_free(p->bundles);
  settings_free(&p->settings);
  free(p->name);
  free(p);
}
