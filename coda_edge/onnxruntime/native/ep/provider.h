/* The execution provider's parts: what each file offers the others. */
#ifndef CODA_PROVIDER_H
#define CODA_PROVIDER_H

#include <pthread.h>

#include "coda.h"
#include "ep_api.h"

enum { REASON_BYTES = 1024 };

typedef struct {
  const OrtApi *ort;
  const OrtEpApi *ep;
  const OrtModelEditorApi *editor;
} host;

/* Returns the status of a call that failed. */
#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    OrtStatus *status_ = (call);                                                                                       \
    if (status_)                                                                                                       \
      return status_;                                                                                                  \
  } while (0)

/* A bundle that the provider runs. */
typedef struct bundle {
  struct bundle *next;
  char *path; /* of its file; NULL: it came within a context node */
  void *memory; /* that such a one lies in */
  coda_model *model;
} bundle;

typedef struct {
  char *bundles; /* paths, separated by ';'; NULL: bundles are compiled just in time */
  char *target, *python, *cache; /* of that compilation; NULL: the defaults */
  char *context_path; /* of the context model; NULL: beside the model */
  bool write_context, embed_context;
} settings;

typedef struct {
  OrtEp base;
  host api;
  char *name;
  const OrtLogger *logger;
  settings settings;
  bundle *bundles;
  char refusal[REASON_BYTES]; /* why a bundle that was asked for cannot be used: the session's creation fails with it */
} provider;

/* The nodes that a bundle computes, and the constants that they read. */
typedef struct {
  const OrtNode **nodes;
  const OrtValueInfo **constants;
  size_t count, constant_count;
  bool whole; /* all nodes of the graph */
} region;

/* A list of what a graph or node has; `items` is to be freed. */
typedef struct {
  const OrtValueInfo **items;
  size_t count;
} values;

/* What runs a model in a node of onnxruntime's. By number in the node, `inputs` and `outputs` are those in the model;
 * the node's inputs before `first_input` are others. */
typedef struct {
  const OrtApi *ort;
  coda_model *model;
  size_t first_input, input_count, output_count;
  int *inputs, *outputs; /* to be freed by runner_free */
  pthread_mutex_t mutex;
  coda_session **idle;
  size_t idle_count, session_count, capacity;
} runner;

/* --- status.c --- */

__attribute__((format(printf, 3, 4))) OrtStatus *status_new(const OrtApi *ort, int code, const char *format, ...);
__attribute__((format(printf, 3, 4))) void tell(const provider *p, int severity, const char *format, ...);

/* A failure of our runtime. */
OrtStatus *status_of(const OrtApi *ort, const coda_error *error);

/* `format` in new memory; NULL if there is none. */
__attribute__((format(printf, 1, 2))) char *text_new(const char *format, ...);

/* --- settings.c --- */

/* Reads the provider's options and those of context models; `settings_free` frees what it got, even if it fails. */
OrtStatus *settings_read(const host *api, const char *provider_name, const OrtSessionOptions *options,
                         settings *result);
void settings_free(settings *s);

/* --- provider.c --- */

OrtStatus *provider_create(const host *api, const char *name, const OrtSessionOptions *options, const OrtLogger *logger,
                           OrtEp **result);
void provider_free(OrtEp *ep);

/* --- bundles.c --- */

/* Opens the bundle at `path`, or the one in `memory` (then owned by the bundle, also if this fails), for `p`. */
OrtStatus *bundle_open(provider *p, const char *path, bundle **result);
OrtStatus *bundle_open_memory(provider *p, void *memory, size_t size, bundle **result);
void bundles_free(bundle *list);

/* A metadata entry; NULL if there is none. */
const char *bundle_metadata(const bundle *b, const char *key);

/* The number of the input (output) of that name; -1 if there is none. */
int bundle_input(const bundle *b, const char *name);
int bundle_output(const bundle *b, const char *name);

/* --- graph.c --- */

OrtStatus *node_inputs(const host *api, const OrtNode *node, values *result);
OrtStatus *node_implicit_inputs(const host *api, const OrtNode *node, values *result);
OrtStatus *node_outputs(const host *api, const OrtNode *node, values *result);

/* The name of a value; "" for one that is not there. */
OrtStatus *value_name(const host *api, const OrtValueInfo *value, const char **name);

/* All nodes of a graph, to be freed. */
OrtStatus *graph_nodes(const host *api, const OrtGraph *graph, const OrtNode ***nodes, size_t *count);

/* --- region.c --- */

/* The nodes between a bundle's inputs and outputs; `reason` says why the graph has no such region, or is empty. */
OrtStatus *region_find(const host *api, const OrtGraph *graph, const bundle *b, region *result,
                       char reason[REASON_BYTES]);
void region_free(region *r);

/* --- identity.c --- */

/* Whether the region is what the bundle was compiled from; `reason` says why not, or is empty. */
OrtStatus *identity_check(const provider *p, const OrtGraph *graph, const region *r, const bundle *b,
                          char reason[REASON_BYTES]);

/* SHA-256, in hexadecimal, of the SHA-256s of a file's pieces of 4 MiB; false if it cannot be read. In pieces, so that
 * the file is never in memory as a whole. */
bool file_digest(const char *path, char hex[65]);

/* --- run.c --- */

void runner_init(runner *r, const OrtApi *ort, coda_model *model);
OrtStatus *runner_run(runner *r, OrtKernelContext *context);
void runner_free(runner *r);

/* --- compute.c --- */

/* What runs a fused node by a bundle. */
OrtStatus *compute_create(const provider *p, const OrtNode *fused, const bundle *b, OrtNodeComputeInfo **result);
void compute_free(OrtNodeComputeInfo *info);

/* --- context.c --- */

OrtStatus *context_is(const provider *p, const OrtNode *node, bool *result);

/* Opens the bundle of a context node of `graph`. */
OrtStatus *context_read(provider *p, const OrtGraph *graph, const OrtNode *node, bundle **result);

/* A context node that takes a fused node's place. */
OrtStatus *context_write(const provider *p, const OrtGraph *graph, const OrtNode *fused, const bundle *b,
                         OrtNode **result);

/* --- just_in_time.c --- */

/* Opens the bundles of the model at `path`, or of its parts, from the cache or compiled now. If there are none, the log
 * has the reason. */
void just_in_time(provider *p, const char *path);

#endif
