/* The bundles of a provider. */
#include <stdlib.h>
#include <string.h>

#include "provider.h"

static bundle *bundle_new(provider *p) {
  bundle *b = calloc(1, sizeof *b);
  if (b) {
    b->next = p->bundles;
    p->bundles = b;
  }
  return b;
}

OrtStatus *bundle_open(provider *p, const char *path, bundle **result) {
  coda_error error;
  coda_model *model;
  if (coda_model_open(path, NULL, &model, &error))
    return status_of(p->api.ort, &error);
  bundle *b = bundle_new(p);
  char *copy = strdup(path);
  if (!b || !copy) {
    coda_model_free(model);
    free(copy);
    return status_new(p->api.ort, ORT_FAIL, "no memory for a bundle");
  }
  b->model = model;
  b->path = copy;
  *result = b;
  return NULL;
}

OrtStatus *bundle_open_memory(provider *p, void *memory, size_t size, bundle **result) {
  bundle *b = bundle_new(p);
  if (!b) {
    free(memory);
    return status_new(p->api.ort, ORT_FAIL, "no memory for a bundle");
  }
  b->memory = memory;
  coda_error error;
  if (coda_model_open_memory(memory, size, NULL, &b->model, &error))
    return status_of(p->api.ort, &error);
  *result = b;
  return NULL;
}

void bundles_free(bundle *list) {
  while (list) {
    bundle *next = list->next;
    coda_model_free(list->model);
    free(list->memory);
    free(list->path);
    free(list);
    list = next;
  }
}

const char *bundle_metadata(const bundle *b, const char *key) {
  const char *name, *value;
  for (size_t i = 0; coda_model_metadata(b->model, i, &name, &value) == 0; i++)
    if (strcmp(name, key) == 0)
      return value;
  return NULL;
}

int bundle_input(const bundle *b, const char *name) {
  for (size_t i = 0; i < coda_model_input_count(b->model); i++)
    if (strcmp(coda_model_input(b->model, i)->name, name) == 0)
      return (int)i;
  return -1;
}

int bundle_output(const bundle *b, const char *name) {
  for (size_t i = 0; i < coda_model_output_count(b->model); i++)
    if (strcmp(coda_model_output(b->model, i)->name, name) == 0)
      return (int)i;
  return -1;
}
