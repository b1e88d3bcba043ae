/* Checks the runtime on the bundles that tests/handmade.py makes: check ENCODER PLACES LEVELS.
 *
 * Built with the runtime's objects, so that it can repair checksums and count allocations; runs under sanitizers too.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "coda.h"
#include "sha256.h"

enum { WIDTH = 6, ROWS = 11, ENTRY = 56, PREFIX = 32, FLOPS = 1 << 28 /* of a token, by tests/handmade.py */ };

int failures;

/* --- counting allocations ----------------------------------------------------------------------------------------- */

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static _Atomic int allocations;

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *data, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *data);

void *malloc(size_t size) {
  allocations++;
  return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
  allocations++;
  return __libc_calloc(count, size);
}

void *realloc(void *data, size_t size) {
  allocations++;
  return __libc_realloc(data, size);
}

int posix_memalign(void **data, size_t alignment, size_t size) {
  allocations++;
  *data = __libc_memalign(alignment, size);
  return *data ? 0 : 12;
}

void free(void *data) {
  allocations++;
  __libc_free(data);
}

#ifdef SYS_mmap2 /* counts in units of 4096 bytes, on machines of 32 bits */
enum { MAP_CALL = SYS_mmap2, MAP_UNIT = 4096 };
#else
enum { MAP_CALL = SYS_mmap, MAP_UNIT = 1 };
#endif

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  allocations++;
  return (void *)syscall(MAP_CALL, address, size, protection, flags, file, offset / MAP_UNIT);
}

int munmap(void *address, size_t size) {
  allocations++;
  return (int)syscall(SYS_munmap, address, size);
}

/* How often memory was asked for or given back. */
static int allocated(void) { return allocations; }
static const bool counts_allocations = true;
#else
static int allocated(void) { return 0; }
static const bool counts_allocations = false;
#endif

/* --- running ------------------------------------------------------------------------------------------------------ */

static float table(int64_t row, int64_t column) { return (float)(row * WIDTH + column - 30) / 4; }

/* Runs at [batch, seq] into the caller's memory, or the session's, and compares with the definition. */
static void run(coda_session *session, int64_t batch, int64_t seq, bool own_outputs) {
  static int64_t ids[4096];
  static float bias[WIDTH], hidden[4096 * WIDTH], total[4096];
  const int64_t tokens = batch * seq;
  for (int64_t i = 0; i < tokens; i++)
    ids[i] = (i * 7 + seq) % ROWS;
  for (int k = 0; k < WIDTH; k++)
    bias[k] = (float)k / 2;
  const coda_tensor inputs[] = {{ids, sizeof ids, CODA_INT64, 2, {batch, seq}},
                                {bias, sizeof bias, CODA_FLOAT32, 1, {WIDTH}}};
  coda_tensor outputs[2] = {{0}};
  if (!own_outputs) {
    outputs[0] = (coda_tensor){.data = hidden, .bytes = sizeof hidden};
    outputs[1] = (coda_tensor){.data = total, .bytes = sizeof total};
  }
  coda_error error = {CODA_OK, ""};
  CHECK(coda_session_run(session, inputs, outputs, &error) == CODA_OK);
  CHECK(outputs[0].rank == 3 && outputs[0].dims[0] == batch && outputs[0].dims[1] == seq &&
        outputs[0].dims[2] == WIDTH);
  CHECK(outputs[0].dtype == CODA_FLOAT32 && outputs[0].bytes == (size_t)tokens * WIDTH * sizeof(float));
  CHECK(outputs[1].rank == 2 && outputs[1].dims[0] == batch && outputs[1].dims[1] == seq);
  for (int64_t i = 0; i < tokens; i++) {
    float sum = 0;
    for (int k = 0; k < WIDTH; k++) {
      const float expected = 3 * table(ids[i], k) + bias[k];
      CHECK(((const float *)outputs[0].data)[i * WIDTH + k] == expected);
      sum += expected;
    }
    CHECK(((const float *)outputs[1].data)[i] == sum);
  }
}

typedef struct {
  size_t steps;
  int64_t end; /* of the last step */
} timeline;

static void note_step(void *context, size_t step, const char *name, int64_t begin_ns, int64_t end_ns) {
  static const char *const NAMES[] = {"0:gather", "1:scale_add", "2:row_sum"};
  timeline *t = context;
  CHECK(step == t->steps % 3 && strcmp(name, NAMES[step]) == 0);
  CHECK(t->end <= begin_ns && begin_ns <= end_ns);
  t->steps++;
  t->end = end_ns;
}

static void check_timer(coda_session *session) {
  timeline t = {0, 0};
  CHECK(coda_session_set_timer(session, note_step, &t, NULL) == CODA_OK);
  run(session, 3, 40, true);
  run(session, 1, 7, false);
  CHECK(t.steps == 6);
  CHECK(coda_session_set_timer(session, NULL, NULL, NULL) == CODA_OK);
  run(session, 3, 40, true);
  CHECK(t.steps == 6);
}

static void check_runs(coda_model *model) {
  for (int threads = 1; threads <= 4; threads++) {
    coda_session *session;
    const coda_session_options options = {.size = sizeof options, .threads = threads, .spin_us = threads == 3 ? 0 : -1};
    CHECK(coda_session_create(model, &options, &session, NULL) == CODA_OK);
    CHECK(coda_session_threads(session) == threads);
    CHECK(coda_session_costs(session, NULL, 0) == 0);
    for (int64_t batch = 1; batch <= 3; batch++)
      for (int64_t seq = 0; seq <= 40; seq++)
        run(session, batch, seq, seq % 2);
    run(session, 3, 40, true); /* the largest outputs in the session's own memory */
    const int before = allocated();
    for (int64_t i = 0; i < 200; i++)
      run(session, 3, 33 + i % 8, i % 3);
    run(session, 3, 40, false);
    CHECK(allocated() == before);
    coda_step_cost costs[8];
    CHECK(coda_session_costs(session, costs, 8) == 3);
    CHECK(costs[1].flops == (int64_t)FLOPS * 3 * 40 && costs[1].bytes == 2 * 3 * 40 * WIDTH);
    check_timer(session);
    coda_session_free(session);
  }
  CHECK(!counts_allocations || allocated() > 0);
}

typedef struct {
  int blocks;
  size_t bytes;
  coda_session *session; /* asked in the middle of its run, when it must refuse */
} account;

static void *account_allocate(void *context, size_t bytes, size_t alignment) {
  account *a = context;
  a->blocks++;
  a->bytes += bytes;
  if (a->session) {
    coda_tensor tensors[2] = {{0}};
    CHECK(coda_session_run(a->session, tensors, tensors, NULL) == CODA_ERROR_ARGUMENT);
  }
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void account_release(void *context, void *data, size_t bytes) {
  account *a = context;
  a->blocks--;
  a->bytes -= bytes;
  free(data);
}

static void check_allocator(coda_model *model) {
  account a = {0, 0, NULL};
  const coda_allocator allocator = {account_allocate, account_release, &a};
  const coda_session_options options = {.size = sizeof options, .threads = 2, .spin_us = 10, .allocator = &allocator};
  coda_session *session;
  CHECK(coda_session_create(model, &options, &session, NULL) == CODA_OK);
  a.session = session;
  run(session, 2, 9, true);
  CHECK(a.blocks > 0 && a.bytes > 0);
  const account before = a;
  run(session, 2, 9, true);
  CHECK(a.blocks == before.blocks && a.bytes == before.bytes);
  coda_session_free(session);
  CHECK(a.blocks == 0 && a.bytes == 0);
}

static void check_misuse(coda_model *model) {
  coda_error error;
  coda_session *session = NULL;
  coda_tensor outputs[2] = {{0}};
  int64_t ids[4] = {0, 1, 2, 11};
  float bias[WIDTH] = {0};
  coda_tensor inputs[] = {{ids, sizeof ids, CODA_INT64, 2, {1, 4}}, {bias, sizeof bias, CODA_FLOAT32, 1, {WIDTH}}};
  const coda_session_options too_many = {.size = sizeof too_many, .threads = 5000};
  CHECK(coda_session_create(model, &too_many, &session, &error) == CODA_ERROR_ARGUMENT && !session);
  CHECK(coda_session_create(NULL, NULL, &session, &error) == CODA_ERROR_ARGUMENT);
  CHECK(coda_session_create(model, NULL, &session, &error) == CODA_OK);
  CHECK(coda_session_run(session, NULL, outputs, &error) == CODA_ERROR_ARGUMENT);
  CHECK(coda_session_run(session, inputs, outputs, &error) == CODA_ERROR_DATA);
  CHECK(strcmp(error.message, "an index is out of range in step '0:gather', from /embed/Gather") == 0);
  CHECK(coda_session_costs(session, NULL, 0) == 0);
  ids[3] = 3;
  inputs[0].bytes = 24;
  CHECK(coda_session_run(session, inputs, outputs, &error) == CODA_ERROR_SHAPE);
  CHECK(strcmp(error.message, "input 'ids' has 24 bytes, expected 32") == 0);
  inputs[0].bytes = sizeof ids;
  inputs[0].data = NULL;
  CHECK(coda_session_run(session, inputs, outputs, &error) == CODA_ERROR_SHAPE);
  CHECK(coda_session_shapes(session, inputs, outputs, &error) == CODA_OK && outputs[1].dims[1] == 4);
  inputs[0].data = ids;
  outputs[0].data = bias;
  outputs[0].bytes = sizeof bias;
  CHECK(coda_session_run(session, inputs, outputs, &error) == CODA_ERROR_SHAPE);
  CHECK(strcmp(error.message, "output 'hidden' has room for 24 bytes, expected 96") == 0);
  inputs[0].dims[1] = 4097;
  CHECK(coda_session_shapes(session, inputs, outputs, &error) == CODA_ERROR_SHAPE);
  CHECK(strcmp(error.message, "seq = 4097 exceeds 4096: positions of the encoder (node '/embed/Gather')") == 0);
  inputs[0].dims[1] = INT64_MAX / 2;
  CHECK(coda_session_shapes(session, inputs, outputs, &error) == CODA_ERROR_SHAPE);
  inputs[0].dims[1] = -1;
  CHECK(coda_session_shapes(session, inputs, outputs, &error) == CODA_ERROR_SHAPE);
  coda_session_free(session);
  CHECK(coda_model_input(model, 2) == NULL && coda_model_output(model, 2) == NULL && coda_model_step(model, 3) == NULL);
  CHECK(strcmp(coda_model_input(model, 0)->dim_text[1], "seq") == 0 && coda_model_input(model, 0)->dims[1] == -1);
  CHECK(coda_model_input(model, 1)->dims[0] == WIDTH && coda_model_feature(model, 0) == NULL);
}

/* --- sizes that data decides ----------------------------------------------------------------------------------------
 */

/* The places of what is not zero, three times each. */
static void run_places(coda_session *session, int64_t n, int64_t every, void *memory, size_t bytes,
                       coda_code expected) {
  static int64_t x[4096];
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++)
    x[i] = i % every == 0;
  const coda_tensor input = {x, sizeof x, CODA_INT64, 1, {n}};
  coda_tensor outputs[2] = {{0}, {.data = memory, .bytes = bytes}};
  CHECK(coda_session_run(session, &input, outputs, NULL) == expected);
  if (expected)
    return;
  const int64_t *y = outputs[1].data;
  for (int64_t i = 0; i < n; i++)
    if (x[i])
      CHECK(y[found++] == 3 * i);
  CHECK(outputs[1].rank == 1 && outputs[1].dims[0] == found && outputs[1].bytes == (size_t)found * sizeof *y);
  CHECK(!memory || outputs[1].data == memory);
  const char *name = NULL;
  int64_t value = -1;
  CHECK(coda_session_data_size(session, 0, &name, &value) == 0 && strcmp(name, "found") == 0 && value == found);
  CHECK(coda_session_data_size(session, 1, &name, &value) == -1);
}

static void check_places(coda_model *model) {
  static int64_t memory[4096];
  for (int threads = 1; threads <= 2; threads++) {
    coda_session *session;
    const coda_session_options options = {.size = sizeof options, .threads = threads, .spin_us = -1};
    CHECK(coda_session_create(model, &options, &session, NULL) == CODA_OK);
    const coda_tensor input = {NULL, 0, CODA_INT64, 1, {100}};
    coda_tensor outputs[2] = {{0}};
    CHECK(coda_session_shapes(session, &input, outputs, NULL) == CODA_OK);
    CHECK(outputs[0].dims[0] == 1 && outputs[0].bytes == 8 && outputs[1].dims[0] == -1 && outputs[1].bytes == 0);
    run_places(session, 100, 7, memory, 14 * sizeof *memory, CODA_ERROR_SHAPE);
    run_places(session, 100, 7, memory, 15 * sizeof *memory, CODA_OK);
    run_places(session, 0, 1, NULL, 0, CODA_OK);
    run_places(session, 4096, 1, NULL, 0, CODA_OK);
    run_places(session, 4000, 1, NULL, 0, CODA_OK);
    const int before = allocated();
    for (int64_t i = 1; i < 200; i++)
      run_places(session, i % 3 ? 4096 : 4000, i, i % 2 ? memory : NULL, sizeof memory, CODA_OK);
    CHECK(allocated() == before);
    coda_session_free(session);
  }
}

/* --- damaged bundles ---------------------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static uint64_t random_below(uint64_t limit) { /* xorshift, Marsaglia 2003 */
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % limit;
}

static coda_code try_open(const uint8_t *data, size_t size) {
  coda_model *model = NULL;
  coda_error error = {CODA_OK, ""};
  const coda_model_options all = {.size = sizeof all, .verify = 1};
  const coda_code code = coda_model_open_memory(data, size, &all, &model, &error);
  CHECK((code == CODA_OK) == (model != NULL));
  CHECK(code == CODA_OK || (error.code == code && error.message[0]));
  if (model) {
    coda_session *session;
    const coda_tensor inputs[] = {{NULL, 0, CODA_INT64, 2, {2, 5}}, {NULL, 0, CODA_FLOAT32, 1, {WIDTH}}};
    coda_tensor outputs[2] = {{0}};
    const coda_session_options options = {.size = sizeof options, .threads = 1};
    if (coda_model_input_count(model) == 2 && coda_model_output_count(model) == 2 &&
        coda_session_create(model, &options, &session, NULL) == CODA_OK) {
      coda_session_shapes(session, inputs, outputs, NULL);
      coda_session_free(session);
    }
  }
  coda_model_free(model);
  return code;
}

static size_t table_end(const uint8_t *data) {
  uint32_t sections;
  memcpy(&sections, data + 12, 4);
  return PREFIX + ENTRY * (size_t)sections;
}

/* Every flipped bit and every cut must be noticed. */
static void check_damage(uint8_t *copy, const uint8_t *data, size_t size) {
  const size_t checksum = table_end(data) + 32, header = checksum + 96; /* key and signature, here of zeros */
  memcpy(copy, data, size);
  for (size_t i = 0; i < 6000; i++) {
    const size_t bit = i < header * 8 ? i : random_below(size * 8);
    const bool of_signature = bit / 8 >= checksum && bit / 8 < header;
    if (of_signature &&
        i % 8 != 7) /* one of each byte: they are slow to check, and the highest is the last key's sign */
      continue;
    copy[bit / 8] ^= (uint8_t)(1 << bit % 8);
    CHECK(try_open(copy, size) == (of_signature ? CODA_ERROR_SIGNATURE : CODA_ERROR_BUNDLE));
    copy[bit / 8] ^= (uint8_t)(1 << bit % 8);
  }
  for (size_t i = 0; i < 500; i++)
    CHECK(try_open(copy, i < 400 ? i : random_below(size)) == CODA_ERROR_BUNDLE);
}

static void repair(uint8_t *data, size_t entry, size_t offset, size_t size) {
  coda_sha256(data + offset, size, data + entry + 24);
  coda_sha256(data, table_end(data), data + table_end(data));
}

/* A plan of nonsense with right checksums must be refused or harmless. */
static void check_nonsense(uint8_t *copy, const uint8_t *data, size_t size) {
  /* Of the last level, which is the one in use: plan, target, library, then two sections of the file. */
  const size_t entry = table_end(data) - 5 * ENTRY;
  uint64_t offset, bytes;
  memcpy(&offset, data + entry + 8, 8);
  memcpy(&bytes, data + entry + 16, 8);
  static const uint8_t VALUES[] = {0, 1, 2, 3, 7, 8, 0x7f, 0x80, 0xff};
  int refused = 0;
  for (int i = 0; i < 4000; i++) {
    memcpy(copy, data, size);
    for (uint64_t n = random_below(3) + 1; n; n--)
      copy[offset + random_below(bytes)] =
          random_below(2) ? VALUES[random_below(sizeof VALUES)] : (uint8_t)random_below(256);
    repair(copy, entry, offset, bytes);
    refused += try_open(copy, size) != CODA_OK;
  }
  CHECK(refused > 1000 && refused < 4000);
}

/* Three layouts of the same table. */
static void check_levels(const char *path) {
  static const char *const TARGETS[] = {"least", "middle", "most", NULL};
  coda_error error;
  coda_model *model;
  coda_session *session;
  for (int i = 0; i < 4; i++) {
    const coda_model_options options = {.size = sizeof options, .target = TARGETS[i]};
    CHECK(coda_model_open(path, &options, &model, &error) == CODA_OK);
    CHECK(strcmp(coda_model_target(model), TARGETS[i] ? TARGETS[i] : "most") == 0);
    CHECK(strcmp(coda_model_held_target(model, 1), "middle") == 0 && !coda_model_held_target(model, 3));
    CHECK(coda_session_create(model, NULL, &session, &error) == CODA_OK);
    run(session, 2, 17, true);
    coda_session_free(session);
    coda_model_free(model);
  }
  const coda_model_options options = {.size = sizeof options, .target = "other"};
  CHECK(coda_model_open(path, &options, &model, &error) == CODA_ERROR_TARGET && !model);
}

static void check_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END))
    exit(2);
  const size_t size = (size_t)ftell(file), room = (size + 4095) / 4096 * 4096;
  uint8_t *data = aligned_alloc(64, room), *copy = aligned_alloc(64, room);
  coda_model *model;
  rewind(file);
  if (!data || !copy || fread(data, 1, size, file) != size)
    exit(2);
  fclose(file);
  CHECK(coda_model_open_memory(data + 1, size - 1, NULL, &model, NULL) == CODA_ERROR_ARGUMENT);
  check_damage(copy, data, size);
  check_nonsense(copy, data, size);
  free(data);
  free(copy);
}

int main(int count, char **words) {
  if (count != 4)
    return 2;
  coda_error error;
  coda_model *model;
  CHECK(coda_abi_version() == CODA_ABI_VERSION);
  check_pool();
  check_cores();
  check_api(words[1]);
  CHECK(coda_model_open("/nowhere/at all.coda", NULL, &model, &error) == CODA_ERROR_FILE && !model);
  CHECK(coda_model_open("/", NULL, &model, &error) == CODA_ERROR_FILE);
  CHECK(coda_model_open(words[1], NULL, &model, &error) == CODA_OK);
  check_runs(model);
  check_allocator(model);
  check_misuse(model);
  coda_session *session;
  CHECK(coda_session_create(model, NULL, &session, &error) == CODA_OK);
  coda_model_free(model); /* the session keeps it */
  run(session, 2, 17, true);
  coda_session_free(session);
  CHECK(coda_model_open(words[2], NULL, &model, &error) == CODA_OK);
  check_places(model);
  coda_model_free(model);
  check_levels(words[3]);
  for (int i = 1; i < count; i++)
    check_file(words[i]);
  printf("%d failures\n", failures);
  return failures != 0;
}
