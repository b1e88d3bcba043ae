/* Fuzzes what reads a bundle, and the interpreter of plans: no input may do more than end in an error.
 *
 *   fuzz SECONDS SEED...    mutates the seeds, which tests/fuzzing.py writes, for so many seconds
 *
 * With CODA_LIBFUZZER defined it has no main: build it with Clang's -fsanitize=fuzzer. An input is a plan section,
 * which is run with kernels that do nothing, or else begins as a bundle does, whose checksums are repaired before it is
 * read; its library is never loaded.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bundle.h"
#include "bytes.h"
#include "coda.h"
#include "sha256.h"

enum {
  MAX_INPUT = 1 << 16,
  MAX_KERNELS = 64,
  MAX_TENSORS = 16,
  MAX_MEMORY = 1 << 20, /* more is refused, as a small machine would */
  DATA = 1 << 16,
  PREFIX = 32,
  ENTRY = 56,
};

/* --- memory with a limit -------------------------------------------------------------------------------------------
 */

static void *limited_allocate(void *context, size_t bytes, size_t alignment) {
  size_t *held = context;
  if (bytes > MAX_MEMORY - *held)
    return NULL;
  void *data = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  *held += data ? bytes : 0;
  return data;
}

static void limited_release(void *context, void *data, size_t bytes) {
  *(size_t *)context -= bytes;
  free(data);
}

/* --- plans ---------------------------------------------------------------------------------------------------------
 */

static int32_t do_nothing(const uint64_t *buffers, const int64_t *ints) {
  (void)buffers;
  return ints[0] == INT64_MIN ? 7 : 0;
}

static void fill(coda_tensor *tensor, const coda_tensor_info *info, void *data, int64_t size) {
  tensor->dtype = info->dtype;
  tensor->rank = info->rank;
  tensor->data = data;
  tensor->bytes = DATA;
  for (int32_t axis = 0; axis < info->rank; axis++)
    tensor->dims[axis] = info->dims[axis] >= 0 ? info->dims[axis] : size;
}

static void run_plan(coda_model *model) {
  static _Alignas(64) uint8_t data[DATA];
  const coda_session_options one = {.size = sizeof one, .threads = 1, .seed = 1};
  coda_session *session;
  if (coda_model_input_count(model) > MAX_TENSORS || coda_model_output_count(model) > MAX_TENSORS ||
      coda_session_create(model, &one, &session, NULL) != CODA_OK)
    return;
  memset(data, 1, sizeof data);
  for (int64_t size = 0; size < 5; size += 2) {
    coda_tensor inputs[MAX_TENSORS] = {{0}}, outputs[MAX_TENSORS] = {{0}};
    coda_error error;
    size_t bytes;
    for (size_t i = 0; i < coda_model_input_count(model); i++)
      fill(&inputs[i], coda_model_input(model, i), data, size);
    coda_session_shapes(session, inputs, outputs, &error);
    coda_session_memory_bytes(session, inputs, &bytes, &error);
    memset(outputs, 0, sizeof outputs);
    coda_session_run(session, inputs, outputs, &error);
  }
  coda_session_free(session);
}

static void fuzz_plan(const uint8_t *plan, size_t size) {
  enum { KERNEL_COUNT = 20 };
  static const _Alignas(64) uint8_t constants[DATA];
  static const char target[] = "fuzz";
  coda_kernel kernels[MAX_KERNELS];
  size_t held = 0;
  const coda_allocator allocator = {limited_allocate, limited_release, &held};
  const coda_model_options options = {.size = sizeof options, .allocator = &allocator};
  const uint32_t count = size >= KERNEL_COUNT + 4 ? coda_u32(plan + KERNEL_COUNT) : 0;
  for (size_t i = 0; i < MAX_KERNELS; i++)
    kernels[i] = do_nothing;
  const coda_linked_model linked = {.abi = CODA_LINKED_VERSION,
                                    .kernel_count = count <= MAX_KERNELS ? count : 0,
                                    .kernels = kernels,
                                    .plan = plan,
                                    .plan_bytes = size,
                                    .constants = constants,
                                    .constant_bytes = sizeof constants,
                                    .target = target,
                                    .target_bytes = sizeof target};
  coda_model *model;
  coda_error error;
  if (coda_model_open_linked(&linked, &options, &model, &error) == CODA_OK) {
    run_plan(model);
    coda_model_free(model);
  }
  if (held)
    abort();
}

/* --- bundles -------------------------------------------------------------------------------------------------------
 */

static void fuzz_bundle(uint8_t *data, size_t size) {
  static coda_sha256_compress compress;
  const uint32_t sections = size >= PREFIX ? coda_u32(data + 12) : 0;
  const size_t table = PREFIX + ENTRY * (size_t)sections;
  coda_bundle bundle;
  coda_error error;
  memset(&bundle, 0, sizeof bundle);
  if (!compress)
    compress = coda_sha256_best();
  for (size_t i = 0; i < sections && table + CODA_SHA256_BYTES <= size; i++) {
    uint8_t *entry = data + PREFIX + ENTRY * i;
    const uint64_t offset = coda_u64(entry + 8), bytes = coda_u64(entry + 16);
    if (offset <= size && bytes <= size - offset)
      coda_sha256_by(compress, data + offset, (size_t)bytes, entry + 24);
  }
  if (sections && table + CODA_SHA256_BYTES <= size)
    coda_sha256_by(compress, data, table, data + table);
  if (coda_bundle_read(data, size, &bundle, &error) == CODA_OK)
    for (uint32_t i = 0; i < bundle.level_count; i++)
      fuzz_plan(bundle.levels[i].plan.data, bundle.levels[i].plan.size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size > MAX_INPUT)
    return 0;
  uint8_t *copy = malloc(size + 1); /* of its own, so that reading beyond it is noticed */
  if (!copy)
    return 0;
  memcpy(copy, data, size);
  if (size >= 4 && memcmp(data, "CODA", 4) == 0)
    fuzz_bundle(copy, size);
  else
    fuzz_plan(copy, size);
  free(copy);
  return 0;
}

/* --- mutation ------------------------------------------------------------------------------------------------------
 */

#ifndef CODA_LIBFUZZER
static uint64_t state = 88172645463325252u;

static uint64_t below(uint64_t limit) { /* xorshift, Marsaglia 2003 */
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % limit;
}

static size_t mutate(uint8_t *data, size_t size) {
  static const uint32_t WORDS[] = {0, 1, 2, 3, 8, 0x7f, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffffe, 1 << 24};
  const uint64_t at = below(size);
  switch (below(6)) {
  case 0: data[at] ^= (uint8_t)(1 << below(8)); return size;
  case 1: data[at] = (uint8_t)below(256); return size;
  case 2: /* an interesting word, where words are */
    if (size >= 4)
      memcpy(data + below(size / 4) * 4, &WORDS[below(sizeof WORDS / sizeof *WORDS)], 4);
    return size;
  case 3: /* a record copied over another one */
    if (size >= 128)
      memmove(data + below((size - 64) / 8) * 8, data + below((size - 64) / 8) * 8, 8 * (1 + below(7)));
    return size;
  case 4: data[at]++; return size;
  default: return below(50) ? size : 1 + at;
  }
}

int main(int count, char **words) {
  static uint8_t data[MAX_INPUT];
  const time_t end = time(NULL) + (count > 1 ? atoi(words[1]) : 0);
  uint64_t executions = 0;
  if (count < 3) {
    fprintf(stderr, "usage: fuzz SECONDS SEED...\n");
    return 2;
  }
  state ^= (uint64_t)time(NULL) << 20;
  const uint64_t begin = state;
  while (time(NULL) < end)
    for (int i = 2; i < count; i++) {
      FILE *file = fopen(words[i], "rb");
      const size_t size = file ? fread(data, 1, sizeof data, file) : 0;
      uint8_t mutated[MAX_INPUT];
      if (file)
        fclose(file);
      if (!size)
        return 2;
      for (int round = 0; round < 1000; round++, executions++) {
        size_t length = size;
        memcpy(mutated, data, size);
        for (uint64_t n = below(8) + (round > 0); n && length; n--)
          length = mutate(mutated, length);
        LLVMFuzzerTestOneInput(mutated, length);
      }
    }
  printf("%llu executions from state %llu\n", (unsigned long long)executions, (unsigned long long)begin);
  return 0;
}
#endif
