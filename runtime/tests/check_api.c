/* Checks of what a program hands to the runtime: memory, descriptors, a wish to stop; and of memory that runs out. */
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "coda.h"

enum { WIDTH = 6, ROWS = 11, BATCH = 3, SEQ = 40, TOKENS = BATCH * SEQ, THREADS = 8, RUNS = 100 };

/* A run of the encoder that tests/handmade.py makes. */
typedef struct {
  int64_t ids[TOKENS];
  float bias[WIDTH], hidden[TOKENS * WIDTH], total[TOKENS];
  coda_tensor inputs[2], outputs[2];
} encoder_run;

static void prepare(encoder_run *r) {
  memset(r, 0, sizeof *r);
  for (int i = 0; i < TOKENS; i++)
    r->ids[i] = i * 7 % ROWS;
  r->bias[2] = 1.5f;
  r->inputs[0] = (coda_tensor){r->ids, sizeof r->ids, CODA_INT64, 2, {BATCH, SEQ}};
  r->inputs[1] = (coda_tensor){r->bias, sizeof r->bias, CODA_FLOAT32, 1, {WIDTH}};
  r->outputs[0] = (coda_tensor){.data = r->hidden, .bytes = sizeof r->hidden};
  r->outputs[1] = (coda_tensor){.data = r->total, .bytes = sizeof r->total};
}

static bool right(const encoder_run *r) {
  for (int i = 0; i < TOKENS; i++)
    for (int k = 0; k < WIDTH; k++)
      if (r->hidden[i * WIDTH + k] != 3 * ((float)(r->ids[i] * WIDTH + k - 30) / 4) + r->bias[k])
        return false;
  return true;
}

static void check_memory(coda_model *model) {
  static _Alignas(64) uint8_t memory[1 << 16];
  encoder_run r;
  coda_session *session;
  const coda_session_options options = {.size = sizeof options, .threads = 2, .spin_us = 0};
  size_t bytes = 0;
  CHECK(coda_session_create(model, &options, &session, NULL) == CODA_OK);
  prepare(&r);
  CHECK(coda_session_memory_bytes(session, r.inputs, &bytes, NULL) == CODA_OK && bytes > 0 && bytes < sizeof memory);
  CHECK(coda_session_set_memory(session, memory + 1, bytes, NULL) == CODA_ERROR_ARGUMENT);
  CHECK(coda_session_set_memory(session, memory, bytes - 1, NULL) == CODA_OK);
  coda_error error = {CODA_OK, ""};
  CHECK(coda_session_run(session, r.inputs, r.outputs, &error) == CODA_ERROR_MEMORY);
  CHECK(strstr(error.message, "of working memory, it was given") != NULL);
  memset(memory, 0xA5, sizeof memory);
  CHECK(coda_session_set_memory(session, memory, bytes, NULL) == CODA_OK);
  for (int i = 0; i < 3; i++) {
    prepare(&r);
    CHECK(coda_session_run(session, r.inputs, r.outputs, NULL) == CODA_OK && right(&r));
  }
  CHECK(memory[bytes] == 0xA5);
  CHECK(coda_session_set_memory(session, NULL, 0, NULL) == CODA_OK);
  memset(memory, 0xA5, sizeof memory);
  prepare(&r);
  CHECK(coda_session_run(session, r.inputs, r.outputs, NULL) == CODA_OK && right(&r));
  CHECK(memory[0] == 0xA5 && memory[bytes - 1] == 0xA5);
  coda_session_free(session);
}

static void check_descriptor(const char *path) {
  char name[] = "/tmp/coda-check-XXXXXX";
  encoder_run r;
  coda_model *model;
  coda_session *session;
  const int from = open(path, O_RDONLY), file = mkstemp(name);
  CHECK(from >= 0 && file >= 0 && unlink(name) == 0);
  const off_t size = lseek(from, 0, SEEK_END);
  uint8_t *data = malloc((size_t)size);
  CHECK(data && pread(from, data, (size_t)size, 0) == size);
  close(from);
  static const off_t OFFSETS[] = {0, 64, 5000, 4096, 8192 + 4};
  for (size_t i = 0; i < sizeof OFFSETS / sizeof *OFFSETS; i++) {
    CHECK(ftruncate(file, 0) == 0 && pwrite(file, data, (size_t)size, OFFSETS[i]) == size);
    CHECK(pwrite(file, "more", 4, OFFSETS[i] + size) == 4);
    CHECK(coda_model_open_fd(file, (uint64_t)OFFSETS[i], (uint64_t)size, NULL, &model, NULL) == CODA_OK);
    CHECK(coda_session_create(model, NULL, &session, NULL) == CODA_OK);
    prepare(&r);
    CHECK(coda_session_run(session, r.inputs, r.outputs, NULL) == CODA_OK && right(&r));
    coda_session_free(session);
    coda_model_free(model);
    CHECK(coda_model_open_fd(file, (uint64_t)OFFSETS[i], 0, NULL, &model, NULL) == CODA_ERROR_BUNDLE && !model);
  }
  CHECK(coda_model_open_fd(file, 1, UINT64_MAX, NULL, &model, NULL) == CODA_ERROR_ARGUMENT);
  CHECK(coda_model_open_fd(-1, 0, 0, NULL, &model, NULL) == CODA_ERROR_FILE);
  close(file);
  free(data);
}

/* Altered constants are noticed by opening, by the first run, or by nobody, as the program wants it. */
static void check_verify(const char *path) {
  const int file = open(path, O_RDONLY);
  const off_t size = lseek(file, 0, SEEK_END);
  uint8_t *data = aligned_alloc(64, ((size_t)size + 63) / 64 * 64);
  CHECK(data && pread(file, data, (size_t)size, 0) == size);
  close(file);
  data[size - 1] ^= 1;
  for (int32_t verify = -1; verify <= 1; verify++) {
    const coda_model_options options = {.size = sizeof options, .verify = verify};
    coda_model *model;
    coda_session *session;
    encoder_run r;
    prepare(&r);
    CHECK(coda_model_open_memory(data, (size_t)size, &options, &model, NULL) ==
          (verify > 0 ? CODA_ERROR_BUNDLE : CODA_OK));
    if (!model)
      continue;
    CHECK(coda_session_create(model, NULL, &session, NULL) == CODA_OK);
    for (int i = 0; i < 2; i++)
      CHECK(coda_session_run(session, r.inputs, r.outputs, NULL) == (verify ? CODA_OK : CODA_ERROR_BUNDLE));
    coda_session_free(session);
    coda_model_free(model);
  }
  free(data);
}

/* Cancels the run that it is called in. */
static void cancel_in_step(void *context, size_t step, const char *name, int64_t begin_ns, int64_t end_ns) {
  (void)name, (void)begin_ns, (void)end_ns;
  if (step == 0)
    coda_session_cancel(context, 1);
}

static void check_cancel(coda_model *model) {
  encoder_run r;
  coda_session *session;
  coda_error error = {CODA_OK, ""};
  CHECK(coda_session_create(model, NULL, &session, NULL) == CODA_OK);
  prepare(&r);
  CHECK(coda_session_set_timer(session, cancel_in_step, session, NULL) == CODA_OK);
  CHECK(coda_session_run(session, r.inputs, r.outputs, &error) == CODA_ERROR_CANCELLED);
  CHECK(strstr(error.message, "was cancelled in step '1:scale_add'") != NULL);
  CHECK(coda_session_set_timer(session, NULL, NULL, NULL) == CODA_OK);
  CHECK(coda_session_run(session, r.inputs, r.outputs, NULL) == CODA_ERROR_CANCELLED);
  CHECK(coda_session_cancel(session, 0) == CODA_OK);
  CHECK(coda_session_run(session, r.inputs, r.outputs, NULL) == CODA_OK && right(&r));
  coda_session_free(session);
}

/* --- memory that runs out ------------------------------------------------------------------------------------------
 */

typedef struct {
  int left, held; /* allocations until one fails; blocks that are held */
} scarce;

static void *scarce_allocate(void *context, size_t bytes, size_t alignment) {
  scarce *s = context;
  if (s->left-- == 0)
    return NULL;
  void *data = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  s->held += data != NULL;
  return data;
}

static void scarce_release(void *context, void *data, size_t bytes) {
  (void)bytes;
  ((scarce *)context)->held--;
  free(data);
}

/* Opens, runs and closes; returns the first code that is not CODA_OK. */
static coda_code try_all(const char *path, const coda_allocator *allocator) {
  const coda_model_options options = {.size = sizeof options, .allocator = allocator};
  const coda_session_options one = {.size = sizeof one, .threads = 1, .spin_us = 0};
  encoder_run r;
  coda_model *model = NULL;
  coda_session *session = NULL;
  prepare(&r);
  r.outputs[1] = (coda_tensor){0};
  coda_code code = coda_model_open(path, &options, &model, NULL);
  if (!code)
    code = coda_session_create(model, &one, &session, NULL);
  if (!code)
    code = coda_session_run(session, r.inputs, r.outputs, NULL);
  CHECK(code || right(&r));
  coda_session_free(session);
  coda_model_free(model);
  return code;
}

/* The system's own memory, of the dynamic linker for example, is not part of this. */
static void check_scarcity(const char *path) {
  int failed = 0;
  for (int n = 0;; n++) {
    scarce s = {n, 0};
    const coda_allocator allocator = {scarce_allocate, scarce_release, &s};
    const coda_code code = try_all(path, &allocator);
    CHECK(s.held == 0);
    if (code == CODA_OK)
      break;
    CHECK(code == CODA_ERROR_MEMORY);
    failed++;
  }
  CHECK(failed >= 8);
  static _Alignas(64) uint8_t memory[1 << 17];
  coda_region region = {memory, sizeof memory, 0};
  const coda_allocator allocator = coda_region_allocator(&region);
  CHECK(try_all(path, &allocator) == CODA_OK);
  CHECK(region.used <= region.bytes);
  for (size_t bytes = 0; bytes < sizeof memory; bytes += 997) {
    region = (coda_region){memory, bytes, 0};
    const coda_code code = try_all(path, &allocator);
    CHECK(code == CODA_OK || code == CODA_ERROR_MEMORY);
  }
}

/* --- several sessions at once ---------------------------------------------------------------------------------------
 */

static void *run_often(void *argument) {
  const coda_session_options one = {.size = sizeof one, .threads = 1, .spin_us = 0};
  encoder_run *r = argument;
  coda_session *session;
  CHECK(coda_session_create((coda_model *)r->outputs[0].data, &one, &session, NULL) == CODA_OK);
  prepare(r);
  for (int i = 0; i < RUNS; i++) {
    memset(r->hidden, 0, sizeof r->hidden);
    CHECK(coda_session_run(session, r->inputs, r->outputs, NULL) == CODA_OK && right(r));
  }
  coda_session_free(session);
  return NULL;
}

/* The first runs of a model, which verify its constants, at the same time. */
static void check_sharing(const char *path) {
  static encoder_run runs[THREADS];
  pthread_t threads[THREADS];
  coda_model *model;
  CHECK(coda_model_open(path, NULL, &model, NULL) == CODA_OK);
  for (int i = 0; i < THREADS; i++) {
    runs[i].outputs[0].data = model;
    CHECK(pthread_create(&threads[i], NULL, run_often, &runs[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 1; i < THREADS; i++)
    CHECK(memcmp(runs[i].hidden, runs[0].hidden, sizeof runs[0].hidden) == 0);
  coda_model_free(model);
}

void check_api(const char *path) {
  coda_model *model;
  CHECK(coda_model_open(path, NULL, &model, NULL) == CODA_OK);
  check_memory(model);
  check_cancel(model);
  coda_model_free(model);
  check_descriptor(path);
  check_verify(path);
  check_scarcity(path);
  check_sharing(path);
}
