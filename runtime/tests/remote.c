/* Calls kernels and runs bundles on this machine for a test on another one, over standard input and output.
 *
 *   remote kernels LIBRARY    remote bundle MODEL THREADS    remote features
 *
 * All numbers are int64 in this machine's order, arrays are preceded by their size in bytes.
 * kernels: name; number of buffers, each as (element size, array), size -1 for a null one; ints (array). Answer:
 * status, then every buffer that is not null. Buffers lie between guard bytes, aligned to their element only; -1 as the
 * status tells that a guard was overwritten. bundle: each input as (rank, dims, array). Answer: code; then for an error
 * its message, else each output as (rank, dims, array).
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coda.h"

enum { GUARD = 256, FILL = 0xA5, MAX_BUFFERS = 64, MAX_TENSORS = 32 };

typedef int32_t (*kernel)(const uint64_t *buffers, const int64_t *ints);

static void stop(const char *why) {
  fprintf(stderr, "remote: %s\n", why);
  exit(1);
}

static int read_all(void *data, size_t bytes) { return bytes == 0 || fread(data, 1, bytes, stdin) == bytes; }

static int64_t read_number(void) {
  int64_t value;
  if (!read_all(&value, sizeof value))
    stop("the request ends early");
  return value;
}

static void write_all(const void *data, size_t bytes) {
  if (bytes && fwrite(data, 1, bytes, stdout) != bytes)
    stop("the answer cannot be written");
}

static void write_number(int64_t value) { write_all(&value, sizeof value); }

static void write_array(const void *data, size_t bytes) {
  write_number((int64_t)bytes);
  write_all(data, bytes);
}

typedef struct {
  uint8_t *memory, *data;
  size_t bytes;
} guarded;

static guarded read_guarded(void) {
  guarded buffer = {NULL, NULL, 0};
  const int64_t element = read_number(), bytes = read_number();
  if (bytes < 0)
    return buffer;
  buffer.bytes = (size_t)bytes;
  buffer.memory = malloc(buffer.bytes + 2 * GUARD + 128);
  if (!buffer.memory)
    stop("out of memory");
  memset(buffer.memory, FILL, buffer.bytes + 2 * GUARD + 128);
  const uintptr_t aligned = ((uintptr_t)buffer.memory + GUARD + 63) / 64 * 64;
  buffer.data = buffer.memory + (aligned - (uintptr_t)buffer.memory) + element;
  if (!read_all(buffer.data, buffer.bytes))
    stop("a buffer ends early");
  return buffer;
}

static int intact(const guarded *buffer) {
  const uint8_t *end = buffer->memory + buffer->bytes + 2 * GUARD + 128;
  for (const uint8_t *p = buffer->memory; p < end; p++)
    if ((p < buffer->data || p >= buffer->data + buffer->bytes) && *p != FILL)
      return 0;
  return 1;
}

static void serve_kernels(const char *path) {
  static char name[256];
  static int64_t ints[MAX_BUFFERS];
  static uint64_t addresses[MAX_BUFFERS];
  static guarded buffers[MAX_BUFFERS];
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    stop(dlerror());
  for (int64_t length; read_all(&length, sizeof length);) {
    if (length < 0 || length >= (int64_t)sizeof name || !read_all(name, (size_t)length))
      stop("no kernel has such a name");
    name[length] = 0;
    void *symbol = dlsym(library, name);
    kernel run = NULL;
    memcpy(&run, &symbol, sizeof run);
    if (!run)
      stop("the library has no such kernel");
    const int64_t count = read_number();
    if (count < 0 || count > MAX_BUFFERS)
      stop("too many buffers");
    for (int64_t i = 0; i < count; i++) {
      buffers[i] = read_guarded();
      addresses[i] = (uint64_t)(uintptr_t)buffers[i].data;
    }
    const int64_t bytes = read_number();
    if (bytes < 0 || bytes > (int64_t)sizeof ints || !read_all(ints, (size_t)bytes))
      stop("too many ints");
    int64_t status = run(addresses, ints);
    for (int64_t i = 0; i < count; i++)
      if (buffers[i].memory && !intact(&buffers[i]))
        status = -1;
    write_number(status);
    for (int64_t i = 0; i < count; i++) {
      write_all(buffers[i].data, buffers[i].bytes);
      free(buffers[i].memory);
    }
    fflush(stdout);
  }
  dlclose(library);
}

static void answer(const coda_model *model, coda_session *session) {
  coda_tensor inputs[MAX_TENSORS] = {0}, outputs[MAX_TENSORS] = {0};
  coda_error error;
  const size_t input_count = coda_model_input_count(model), output_count = coda_model_output_count(model);
  for (size_t i = 0; i < input_count; i++) {
    inputs[i].dtype = coda_model_input(model, i)->dtype;
    inputs[i].rank = (int32_t)read_number();
    for (int32_t axis = 0; axis < inputs[i].rank && axis < CODA_MAX_RANK; axis++)
      inputs[i].dims[axis] = read_number();
    inputs[i].bytes = (size_t)read_number();
    inputs[i].data = malloc(inputs[i].bytes + 1);
    if (!inputs[i].data || !read_all(inputs[i].data, inputs[i].bytes))
      stop("an input ends early");
  }
  const coda_code code = coda_session_run(session, inputs, outputs, &error);
  write_number(code);
  if (code)
    write_array(error.message, strlen(error.message));
  for (size_t i = 0; !code && i < output_count; i++) {
    write_number(outputs[i].rank);
    write_all(outputs[i].dims, (size_t)outputs[i].rank * sizeof *outputs[i].dims);
    write_array(outputs[i].data, outputs[i].bytes);
  }
  fflush(stdout);
  for (size_t i = 0; i < input_count; i++)
    free(inputs[i].data);
}

static void serve_bundle(const char *path, int threads) {
  const coda_session_options options = {.size = sizeof options, .threads = threads, .spin_us = -1};
  coda_model *model;
  coda_session *session;
  coda_error error;
  if (coda_model_open(path, NULL, &model, &error) || coda_session_create(model, &options, &session, &error))
    stop(error.message);
  if (coda_model_input_count(model) > MAX_TENSORS || coda_model_output_count(model) > MAX_TENSORS)
    stop("too many tensors");
  for (int next; (next = getchar()) != EOF;) {
    ungetc(next, stdin);
    answer(model, session);
  }
  coda_session_free(session);
  coda_model_free(model);
}

int main(int count, char **words) {
  if (count == 3 && strcmp(words[1], "kernels") == 0)
    serve_kernels(words[2]);
  else if (count == 4 && strcmp(words[1], "bundle") == 0)
    serve_bundle(words[2], atoi(words[3]));
  else if (count == 2 && strcmp(words[1], "features") == 0) {
    const char *names[64];
    const size_t known = coda_cpu_features(names, 64);
    for (size_t i = 0; i < known; i++)
      puts(names[i]);
  } else
    stop("usage: remote kernels LIBRARY | bundle MODEL THREADS | features");
  return 0;
}
