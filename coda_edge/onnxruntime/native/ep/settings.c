/* Options: those of the provider (`ep.<its name in lower case>.<option>` among the session's) and of context models. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

/* The value of a session option in new memory; NULL if it is not set, or empty. */
static OrtStatus *read_entry(const OrtApi *ort, const OrtSessionOptions *options, const char *key, char **value) {
  int there = 0;
  size_t size = 0;
  *value = NULL;
  TRY(ort->HasSessionConfigEntry(options, key, &there));
  if (!there)
    return NULL;
  TRY(ort->GetSessionConfigEntry(options, key, NULL, &size));
  if (size < 2)
    return NULL;
  *value = malloc(size);
  if (!*value)
    return status_new(ort, ORT_FAIL, "no memory for an option");
  return ort->GetSessionConfigEntry(options, key, *value, &size);
}

static OrtStatus *read_flag(const OrtApi *ort, const OrtSessionOptions *options, const char *key, bool *flag) {
  char *value;
  OrtStatus *status = read_entry(ort, options, key, &value);
  *flag = value && strcmp(value, "0") != 0;
  free(value);
  return status;
}

OrtStatus *settings_read(const host *api, const char *provider_name, const OrtSessionOptions *options,
                         settings *result) {
  const struct {
    const char *option;
    char **value;
  } texts[] = {
      {"bundle", &result->bundles},
      {"target", &result->target},
      {"python", &result->python},
      {"cache", &result->cache},
  };
  *result = (settings){.write_context = false};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    char *key = text_new("ep.%s.%s", provider_name, texts[i].option);
    if (!key)
      return status_new(api->ort, ORT_FAIL, "no memory for an option");
    for (char *c = key; *c; c++)
      *c = (char)tolower((unsigned char)*c);
    OrtStatus *status = read_entry(api->ort, options, key, texts[i].value);
    free(key);
    TRY(status);
  }
  TRY(read_entry(api->ort, options, "ep.context_file_path", &result->context_path));
  TRY(read_flag(api->ort, options, "ep.context_enable", &result->write_context));
  return read_flag(api->ort, options, "ep.context_embed_mode", &result->embed_context);
}

void settings_free(settings *s) {
  char *texts[] = {s->bundles, s->target, s->python, s->cache, s->context_path};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    free(texts[i]);
}
