/* Runs a model that is linked into this program for a test on another machine, over standard input and output, as the
 * mode `bundle` of remote.c does. Built with MODEL, its name, and MODEL_HEADER, its header in quotes. All memory that
 * the runtime has comes from one array. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include MODEL_HEADER

#define JOIN(a, b) a##b
#define OPEN(name) JOIN(name, _open)

enum { MEMORY = 64 << 20, MAX_TENSORS = 32, INPUT = 1 << 20 };

static _Alignas(64) uint8_t memory[MEMORY];
static _Alignas(64) uint8_t inputs_memory[MAX_TENSORS][INPUT];

static void stop(const char *why) {
  fprintf(stderr, "linked: %s\n", why);
  exit(1);
}

static void read_all(void *data, size_t bytes) {
  if (bytes && fread(data, 1, bytes, stdin) != bytes)
    stop("the request ends early");
}

static int64_t read_number(void) {
  int64_t value;
  read_all(&value, sizeof value);
  return value;
}

static void write_all(const void *data, size_t bytes) {
  if (bytes && fwrite(data, 1, bytes, stdout) != bytes)
    stop("the answer cannot be written");
}

static void write_number(int64_t value) { write_all(&value, sizeof value); }

static void answer(const coda_model *model, coda_session *session) {
  coda_tensor inputs[MAX_TENSORS] = {{0}}, outputs[MAX_TENSORS] = {{0}};
  coda_error error;
  for (size_t i = 0; i < coda_model_input_count(model); i++) {
    inputs[i].dtype = coda_model_input(model, i)->dtype;
    inputs[i].rank = (int32_t)read_number();
    for (int32_t axis = 0; axis < inputs[i].rank && axis < CODA_MAX_RANK; axis++)
      inputs[i].dims[axis] = read_number();
    inputs[i].bytes = (size_t)read_number();
    inputs[i].data = inputs_memory[i];
    if (inputs[i].bytes > INPUT)
      stop("an input is too large");
    read_all(inputs[i].data, inputs[i].bytes);
  }
  const coda_code code = coda_session_run(session, inputs, outputs, &error);
  write_number(code);
  if (code) {
    write_number((int64_t)strlen(error.message));
    write_all(error.message, strlen(error.message));
  }
  for (size_t i = 0; !code && i < coda_model_output_count(model); i++) {
    write_number(outputs[i].rank);
    write_all(outputs[i].dims, (size_t)outputs[i].rank * sizeof *outputs[i].dims);
    write_number((int64_t)outputs[i].bytes);
    write_all(outputs[i].data, outputs[i].bytes);
  }
  fflush(stdout);
}

int main(void) {
  coda_region region = {memory, MEMORY, 0};
  const coda_allocator allocator = coda_region_allocator(&region);
  const coda_model_options options = {.size = sizeof options, .allocator = &allocator};
  const coda_session_options one = {.size = sizeof one, .threads = 1, .spin_us = -1};
  coda_model *model;
  coda_session *session;
  coda_error error;
  if (OPEN(MODEL)(&options, &model, &error) || coda_session_create(model, &one, &session, &error))
    stop(error.message);
  for (int next; (next = getchar()) != EOF;) {
    ungetc(next, stdin);
    answer(model, session);
  }
  coda_session_free(session);
  coda_model_free(model);
  return 0;
}
