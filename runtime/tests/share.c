/* Sessions of one model on threads of their own, whose outputs must be those of a single thread, bit for bit.
 *
 *   share BUNDLE THREADS RUNS SIZE    each thread runs its session RUNS times; SIZE is of every dimension that is open
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coda.h"

enum { MAX_TENSORS = 16, MAX_THREADS = 64, VARIANTS = 4 };

typedef struct {
  coda_tensor inputs[MAX_TENSORS], outputs[MAX_TENSORS];
} variant;

static coda_model *model;
static variant variants[VARIANTS];
static int runs;
static atomic_int differences;

static void stop(const char *why) {
  fprintf(stderr, "share: %s\n", why);
  exit(1);
}

static void *take(size_t bytes) {
  void *data = calloc(1, bytes + !bytes);
  if (!data)
    stop("no memory");
  return data;
}

/* Zeros and ones, which are tokens, masks and values alike. */
static void fill(coda_tensor *tensor, const coda_tensor_info *info, int64_t size, int number) {
  size_t count = 1;
  tensor->dtype = info->dtype;
  tensor->rank = info->rank;
  for (int32_t axis = 0; axis < info->rank; axis++) {
    tensor->dims[axis] = info->dims[axis] >= 0 ? info->dims[axis] : size;
    count *= (size_t)tensor->dims[axis];
  }
  const bool whole = info->dtype == CODA_INT64;
  if (!whole && info->dtype != CODA_FLOAT32)
    stop("a model with inputs of int64 and float32 is expected");
  tensor->bytes = count * (whole ? sizeof(int64_t) : sizeof(float));
  tensor->data = take(tensor->bytes);
  for (size_t i = 0; i < count; i++) {
    const int value = (int)((i + 1) * 2654435761u >> (29 - number)) & 1; /* multiplicative hashing, Knuth */
    if (whole)
      ((int64_t *)tensor->data)[i] = value;
    else
      ((float *)tensor->data)[i] = (float)value;
  }
}

static coda_session *make_session(void) {
  const coda_session_options one = {.size = sizeof one, .threads = 1};
  coda_session *session;
  coda_error error;
  if (coda_session_create(model, &one, &session, &error))
    stop(error.message);
  return session;
}

static void *run_often(void *argument) {
  const int first = *(int *)argument;
  coda_session *session = make_session();
  for (int i = 0; i < runs; i++) {
    const variant *v = &variants[(first + i) % VARIANTS];
    coda_tensor outputs[MAX_TENSORS] = {{0}};
    coda_error error;
    if (coda_session_run(session, v->inputs, outputs, &error))
      stop(error.message);
    for (size_t k = 0; k < coda_model_output_count(model); k++)
      differences += outputs[k].bytes != v->outputs[k].bytes ||
                     memcmp(outputs[k].data, v->outputs[k].data, outputs[k].bytes) != 0;
  }
  coda_session_free(session);
  return NULL;
}

int main(int count, char **words) {
  pthread_t threads[MAX_THREADS];
  int numbers[MAX_THREADS];
  coda_error error;
  if (count != 5)
    stop("usage: share BUNDLE THREADS RUNS SIZE");
  const int many = atoi(words[2]);
  const int64_t size = atoi(words[4]);
  runs = atoi(words[3]);
  if (many < 1 || many > MAX_THREADS || coda_model_open(words[1], NULL, &model, &error))
    stop(many < 1 || many > MAX_THREADS ? "from 1 to 64 threads" : error.message);
  if (coda_model_input_count(model) > MAX_TENSORS || coda_model_output_count(model) > MAX_TENSORS)
    stop("the model has more inputs or outputs than there is room for");
  coda_session *session = make_session();
  for (int n = 0; n < VARIANTS; n++) {
    for (size_t i = 0; i < coda_model_input_count(model); i++)
      fill(&variants[n].inputs[i], coda_model_input(model, i), size, n);
    if (coda_session_run(session, variants[n].inputs, variants[n].outputs, &error))
      stop(error.message);
    for (size_t k = 0; k < coda_model_output_count(model); k++) {
      coda_tensor *output = &variants[n].outputs[k];
      output->data = memcpy(take(output->bytes), output->data, output->bytes);
    }
  }
  coda_session_free(session);
  for (int i = 0; i < many; i++) {
    numbers[i] = i;
    if (pthread_create(&threads[i], NULL, run_often, &numbers[i]))
      stop("no thread");
  }
  for (int i = 0; i < many; i++)
    pthread_join(threads[i], NULL);
  for (int n = 0; n < VARIANTS; n++) {
    for (int i = 0; i < MAX_TENSORS; i++) {
      free(variants[n].inputs[i].data);
      free(variants[n].outputs[i].data);
    }
  }
  coda_model_free(model);
  printf("%d threads, %d runs each, %d differences\n", many, runs, differences);
  return differences != 0;
}
