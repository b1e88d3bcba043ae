/* Context models: an EPContext node (domain com.microsoft) stands for a fused node, and holds its bundle or names its
 * file.
 *
 * Some releases of onnxruntime cut a text attribute at its first zero byte, so that an embedded bundle has none
 * (Cheshire and Baker 1999, "Consistent Overhead Byte Stuffing"): a byte n is followed by n - 1 others, and, unless n
 * is 255 or the end is reached, stands for a zero behind these. */
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "provider.h"

#define SOURCE "CodaEP"

enum { BLOCK = 255, ALIGNMENT = 64, COPY_BYTES = 1 << 16 };

/* --- bytes as text ------------------------------------------------------------------------------------------------ */

/* Returns the length of the text, which is at most size + size / 254 + 1. */
static size_t stuff(const uint8_t *data, size_t size, uint8_t *text) {
  size_t length = 1, head = 0;
  uint8_t run = 1;
  for (size_t i = 0; i < size; i++) {
    if (data[i]) {
      text[length++] = data[i];
      run++;
    }
    if (!data[i] || run == BLOCK) {
      text[head] = run;
      head = length++;
      run = 1;
    }
  }
  text[head] = run;
  return length;
}

/* The reverse, into data[0, length): returns the number of bytes. */
static size_t unstuff(const uint8_t *text, size_t length, uint8_t *data) {
  size_t size = 0, i = 0;
  while (i < length) {
    const uint8_t run = text[i++];
    for (uint8_t k = 1; k < run && i < length; k++)
      data[size++] = text[i++];
    if (run != BLOCK && i < length)
      data[size++] = 0;
  }
  return size;
}

/* --- reading ------------------------------------------------------------------------------------------------------ */

/* A text attribute in new memory; NULL if there is none. Releases differ in whether its size counts a zero at its end.
 */
static OrtStatus *read_text(const host *api, const OrtNode *node, const char *name, char **text) {
  const OrtOpAttr *attribute = NULL;
  size_t size = 0;
  *text = NULL;
  OrtStatus *status = api->ort->Node_GetAttributeByName(node, name, &attribute);
  if (status) /* some releases say in this way that it is not there */
    api->ort->ReleaseStatus(status);
  if (status || !attribute)
    return NULL;
  status = api->ort->ReadOpAttr(attribute, ORT_ATTRIBUTE_STRING, NULL, 0, &size);
  if (status)
    api->ort->ReleaseStatus(status);
  if (!size)
    return NULL;
  *text = calloc(size + 1, 1);
  if (!*text)
    return status_new(api->ort, ORT_FAIL, "no memory for the attribute '%s'", name);
  return api->ort->ReadOpAttr(attribute, ORT_ATTRIBUTE_STRING, *text, size + 1, &size);
}

static OrtStatus *read_number(const host *api, const OrtNode *node, const char *name, int64_t *number) {
  const OrtOpAttr *attribute = NULL;
  size_t size;
  OrtStatus *status = api->ort->Node_GetAttributeByName(node, name, &attribute);
  if (status)
    api->ort->ReleaseStatus(status);
  if (status || !attribute)
    return NULL;
  return api->ort->ReadOpAttr(attribute, ORT_ATTRIBUTE_INT, number, sizeof *number, &size);
}

OrtStatus *context_is(const provider *p, const OrtNode *node, bool *result) {
  const char *type, *domain;
  char *source;
  *result = false;
  TRY(p->api.ort->Node_GetOperatorType(node, &type));
  TRY(p->api.ort->Node_GetDomain(node, &domain));
  if (strcmp(type, "EPContext") != 0 || strcmp(domain, "com.microsoft") != 0)
    return NULL;
  OrtStatus *status = read_text(&p->api, node, "source", &source);
  *result = !status && source && strcmp(source, SOURCE) == 0;
  free(source);
  return status;
}

/* The length of the folder's part of a path, with its slash. */
static int folder_length(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? (int)(slash - path) + 1 : 0;
}

/* A context model and the bundles beside it move together: only plain names are taken. */
static OrtStatus *open_beside(provider *p, const OrtGraph *graph, const char *name, bundle **result) {
  const char *model = NULL;
  TRY(p->api.ort->Graph_GetModelPath(graph, &model));
  if (!model || !*model)
    model = p->settings.context_path;
  if (!model)
    return status_new(p->api.ort, ORT_INVALID_ARGUMENT,
                      "the context model names the bundle '%.300s' and came without a file's name itself: load it from "
                      "its file, or set the session option ep.context_file_path",
                      name);
  if (strchr(name, '/'))
    return status_new(p->api.ort, ORT_INVALID_GRAPH, "the context model names '%.300s', expected a file beside it",
                      name);
  char *path = text_new("%.*s%s", folder_length(model), model, name);
  OrtStatus *status = path ? bundle_open(p, path, result) : status_new(p->api.ort, ORT_FAIL, "no memory for a path");
  free(path);
  return status;
}

static OrtStatus *open_embedded(provider *p, const char *text, bundle **result) {
  const size_t length = strlen(text);
  void *memory;
  if (posix_memalign(&memory, ALIGNMENT, length + 1))
    return status_new(p->api.ort, ORT_FAIL, "no memory for a bundle of %zu bytes", length);
  const size_t size = unstuff((const uint8_t *)text, length, memory);
  return bundle_open_memory(p, memory, size, result);
}

OrtStatus *context_read(provider *p, const OrtGraph *graph, const OrtNode *node, bundle **result) {
  const OrtApi *ort = p->api.ort;
  int64_t embedded = 1;
  char *text = NULL;
  TRY(read_number(&p->api, node, "embed_mode", &embedded));
  OrtStatus *status = read_text(&p->api, node, "ep_cache_context", &text);
  if (!status && !text)
    status = status_new(ort, ORT_INVALID_GRAPH, "its EPContext node has no attribute 'ep_cache_context'");
  if (!status)
    status = embedded ? open_embedded(p, text, result) : open_beside(p, graph, text, result);
  free(text);
  if (!status)
    return NULL;
  OrtStatus *explained = status_new(ort, ORT_EP_FAIL,
                                    "the context model cannot be used: %s. Make it again, by a session on the original "
                                    "model with ep.context_enable=1",
                                    ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  return explained;
}

/* --- writing ------------------------------------------------------------------------------------------------------ */

/* The file of a bundle; its bytes in new memory. */
static OrtStatus *read_file(const OrtApi *ort, const char *path, uint8_t **data, size_t *size) {
  FILE *file = fopen(path, "rbe");
  struct stat info;
  *data = NULL;
  if (file && fstat(fileno(file), &info) == 0 && (*data = malloc((size_t)info.st_size + 1)))
    *size = fread(*data, 1, (size_t)info.st_size, file);
  const bool whole = *data && *size == (size_t)info.st_size;
  if (file)
    fclose(file);
  if (whole)
    return NULL;
  free(*data);
  *data = NULL;
  return status_new(ort, ORT_FAIL, "the bundle '%s' could not be read again for the context model", path);
}

static OrtStatus *embed(const OrtApi *ort, const bundle *b, char **text) {
  uint8_t *data;
  size_t size = 0;
  TRY(read_file(ort, b->path, &data, &size));
  const size_t room = size + size / (BLOCK - 1) + 2;
  OrtStatus *status = NULL;
  *text = room < INT_MAX ? malloc(room) : NULL;
  if (*text)
    (*text)[stuff(data, size, (uint8_t *)*text)] = 0;
  else
    status = status_new(ort, ORT_FAIL,
                        "a bundle of %zu bytes is too large for a context model: set "
                        "ep.context_embed_mode=0",
                        size);
  free(data);
  return status;
}

static bool copy_file(const char *from, const char *to) {
  char *part = text_new("%s.%d.part", to, (int)getpid()), *block = malloc(COPY_BYTES);
  FILE *in = fopen(from, "rbe"), *out = part ? fopen(part, "wbe") : NULL;
  bool good = in && out && block;
  size_t got;
  while (good && (got = fread(block, 1, COPY_BYTES, in)))
    good = fwrite(block, 1, got, out) == got;
  good = good && !ferror(in);
  if (in)
    fclose(in);
  if (out)
    good = fclose(out) == 0 && good;
  good = good && rename(part, to) == 0;
  if (!good && out)
    unlink(part);
  free(part);
  free(block);
  return good;
}

/* Copies the bundle beside the context model; `text` is the copy's name. */
static OrtStatus *put_beside(const provider *p, const OrtGraph *graph, const bundle *b, const char *node_name,
                             char **text) {
  const OrtApi *ort = p->api.ort;
  const char *model = p->settings.context_path;
  if (!model)
    TRY(ort->Graph_GetModelPath(graph, &model));
  if (!model || !*model)
    return status_new(ort, ORT_INVALID_ARGUMENT,
                      "a context model without a file's name cannot have its bundle beside it: set "
                      "ep.context_file_path, or ep.context_embed_mode=1");
  const int folder = folder_length(model);
  const char *stem = model + folder, *dot = strrchr(stem, '.');
  *text = text_new("%.*s_%s.coda", dot ? (int)(dot - stem) : (int)strlen(stem), stem, node_name);
  char *path = *text ? text_new("%.*s%s", folder, model, *text) : NULL;
  if (!path)
    return status_new(ort, ORT_FAIL, "no memory for a path");
  for (char *c = path + folder, *copy = *text; *c; c++, copy++)
    *c = *copy = isalnum((unsigned char)*c) || *c == '.' || *c == '-' ? *c : '_';
  OrtStatus *status = copy_file(b->path, path) ? NULL : status_new(ort, ORT_FAIL, "'%s' could not be written", path);
  free(path);
  return status;
}

typedef struct {
  const char *name;
  const void *data;
  int length, type;
} attribute;

static const char **names_of(const host *api, const values *list, OrtStatus **status) {
  const char **names = calloc(list->count + 1, sizeof(const char *));
  *status = names ? NULL : status_new(api->ort, ORT_FAIL, "no memory for a context node");
  for (size_t i = 0; i < list->count && !*status; i++)
    *status = value_name(api, list->items[i], &names[i]);
  return names;
}

/* A node with the inputs and outputs of `fused`. */
static OrtStatus *make_node(const host *api, const OrtNode *fused, const char *name, OrtOpAttr **attributes,
                            size_t count, OrtNode **result) {
  values inputs = {NULL, 0}, outputs = {NULL, 0};
  const char **input_names = NULL, **output_names = NULL;
  OrtStatus *status = node_inputs(api, fused, &inputs);
  if (!status)
    status = node_outputs(api, fused, &outputs);
  if (!status)
    input_names = names_of(api, &inputs, &status);
  if (!status)
    output_names = names_of(api, &outputs, &status);
  if (!status)
    status = api->editor->CreateNode("EPContext", "com.microsoft", name, input_names, inputs.count, output_names,
                                     outputs.count, attributes, count, result);
  free(input_names);
  free(output_names);
  free(inputs.items);
  free(outputs.items);
  return status;
}

OrtStatus *context_write(const provider *p, const OrtGraph *graph, const OrtNode *fused, const bundle *b,
                         OrtNode **result) {
  const OrtApi *ort = p->api.ort;
  const int64_t main = 1, mode = p->settings.embed_context;
  const char *name;
  char *text = NULL;
  TRY(ort->Node_GetName(fused, &name));
  OrtStatus *status = mode ? embed(ort, b, &text) : put_beside(p, graph, b, name, &text);
  const attribute wanted[] = {
      {"main_context", &main, 1, ORT_ATTRIBUTE_INT},
      {"embed_mode", &mode, 1, ORT_ATTRIBUTE_INT},
      {"ep_cache_context", text, text ? (int)strlen(text) : 0, ORT_ATTRIBUTE_STRING},
      {"source", SOURCE, (int)strlen(SOURCE), ORT_ATTRIBUTE_STRING},
      {"partition_name", name, (int)strlen(name), ORT_ATTRIBUTE_STRING},
      {"ep_sdk_version", CODA_VERSION_TEXT, (int)strlen(CODA_VERSION_TEXT), ORT_ATTRIBUTE_STRING},
  };
  enum { COUNT = sizeof wanted / sizeof *wanted };
  OrtOpAttr *attributes[COUNT] = {NULL};
  for (size_t i = 0; i < COUNT && !status; i++)
    status = ort->CreateOpAttr(wanted[i].name, wanted[i].data, wanted[i].length, wanted[i].type, &attributes[i]);
  if (!status)
    status = make_node(&p->api, fused, name, attributes, COUNT, result);
  for (size_t i = 0; i < COUNT; i++)
    if (attributes[i])
      ort->ReleaseOpAttr(attributes[i]);
  free(text);
  return status;
}
