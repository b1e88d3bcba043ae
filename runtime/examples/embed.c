/* Prints the embedding of a sentence: the mean over its tokens of what an encoder gives for each.
 *
 *   embed model.coda 101 7592 2088 102
 *
 * The model takes int64 tensors [batch, sequence]: token ids, a mask (1: a token), and others (token types) that may be
 * 0; its first output is float32 [batch, sequence, width].
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coda.h"

static int fail(const coda_error *error) {
  fprintf(stderr, "embed: %s\n", error->message);
  return 1;
}

enum { MAX_TOKENS = 512, MAX_TENSORS = 8 };

static bool is_encoder(const coda_model *model) {
  const coda_tensor_info *first = coda_model_output(model, 0);
  return coda_model_input_count(model) <= MAX_TENSORS && coda_model_output_count(model) <= MAX_TENSORS && first &&
         first->dtype == CODA_FLOAT32 && first->rank == 3;
}

int main(int count, char **words) {
  static int64_t ids[MAX_TOKENS], ones[MAX_TOKENS], zeros[MAX_TOKENS];
  coda_tensor inputs[MAX_TENSORS] = {0}, outputs[MAX_TENSORS] = {0};
  coda_model *model;
  coda_session *session;
  coda_error error;
  const int64_t tokens = count - 2;
  if (tokens < 1 || tokens > MAX_TOKENS) {
    fprintf(stderr, "usage: embed model.coda TOKEN... (1 to %d token ids)\n", MAX_TOKENS);
    return 2;
  }
  for (int64_t i = 0; i < tokens; i++) {
    ids[i] = atoll(words[i + 2]);
    ones[i] = 1;
  }
  if (coda_model_open(words[1], NULL, &model, &error))
    return fail(&error);
  if (!is_encoder(model)) {
    fprintf(stderr, "embed: %s is no encoder of sentences\n", words[1]);
    return 1;
  }
  for (size_t i = 0; i < coda_model_input_count(model); i++) {
    const char *name = coda_model_input(model, i)->name;
    int64_t *data = strstr(name, "mask") ? ones : strstr(name, "ids") && !strstr(name, "type") ? ids : zeros;
    inputs[i] = (coda_tensor){.data = data, .bytes = sizeof ids, .dtype = CODA_INT64, .rank = 2, .dims = {1, tokens}};
  }
  if (coda_session_create(model, NULL, &session, &error) || coda_session_run(session, inputs, outputs, &error))
    return fail(&error);
  const float *hidden = outputs[0].data; /* the session's memory, until its next run */
  for (int64_t k = 0; k < outputs[0].dims[2]; k++) {
    float sum = 0;
    for (int64_t i = 0; i < tokens; i++)
      sum += hidden[i * outputs[0].dims[2] + k];
    printf("%.6f\n", sum / (float)tokens);
  }
  coda_session_free(session);
  coda_model_free(model);
  return 0;
}
