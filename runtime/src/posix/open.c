/* Opens bundles: files, descriptors, memory. Kernels are loaded after their checksum and, with a key, the signature of
 * all have been verified. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bundle.h"
#include "cuda.h"
#include "ed25519.h"
#include "loader.h"
#include "platform.h"
#include "sha256.h"
#include "text.h"

enum { ALIGNMENT = 64 };

/* What a model holds of its bundle. */
typedef struct {
  const uint8_t *data;
  size_t size;
  void *mapping; /* of a file; NULL for memory of the caller's */
  size_t mapped;
  coda_block copy; /* of a file that cannot be used where it is mapped */
  coda_bundle bundle;
  const coda_level *level; /* that is in use */
  coda_library library;
  coda_cuda *cuda; /* where the level in use is for a GPU */
} origin;

static void release(origin *o, const coda_allocator *allocator) {
  coda_cuda_close(o->cuda, allocator);
  coda_library_close(&o->library);
  if (o->mapping)
    munmap(o->mapping, o->mapped);
  coda_block_free(&o->copy, allocator);
}

static void close_origin(coda_model *model) {
  release(model->origin, &model->allocator);
  model->allocator.release(model->allocator.context, model->origin, sizeof(origin));
}

/* --- trust -------------------------------------------------------------------------------------------------------- */

typedef struct {
  const coda_section *constants;
  uint8_t (*digests)[CODA_SHA256_BYTES];
  coda_sha256_compress compress;
} hashing;

static int32_t hash_blocks(void *context, int64_t begin, int64_t end, int thread) {
  const hashing *h = context;
  (void)thread;
  for (int64_t i = begin; i < end; i++) {
    const size_t offset = (size_t)i * CODA_CONSTANT_BLOCK, left = h->constants->size - offset;
    const size_t size = left < CODA_CONSTANT_BLOCK ? left : CODA_CONSTANT_BLOCK;
    coda_sha256_by(h->compress, h->constants->data + offset, size, h->digests[i]);
  }
  return 0;
}

static coda_code verify_constants(const coda_model *model, coda_pool *pool, const coda_allocator *allocator,
                                  coda_error *error) {
  enum { BLOCK_NS = 500000 }; /* about */
  const origin *o = model->origin;
  const int64_t blocks = (int64_t)((model->constants.size + CODA_CONSTANT_BLOCK - 1) / CODA_CONSTANT_BLOCK);
  const size_t bytes = (size_t)blocks * CODA_SHA256_BYTES;
  uint8_t digest[CODA_SHA256_BYTES];
  coda_block digests = {NULL, 0};
  if (coda_block_reserve(&digests, bytes, ALIGNMENT, allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for %zu bytes of checksums", bytes);
  hashing h = {&model->constants, (uint8_t (*)[CODA_SHA256_BYTES])digests.data, coda_sha256_best()};
  if (pool)
    coda_pool_for(pool, blocks, 1, blocks * BLOCK_NS, hash_blocks, &h);
  else
    hash_blocks(&h, 0, blocks, 0);
  coda_sha256_by(h.compress, digests.data, bytes, digest);
  coda_block_free(&digests, allocator);
  if (memcmp(digest, o->bundle.constants_digest, sizeof digest) != 0)
    return coda_fail(error, CODA_ERROR_BUNDLE, "bundle is damaged: the checksum of section 'constants' differs");
  return CODA_OK;
}

int32_t coda_signature_valid(const uint8_t *key, const void *message, size_t size, const uint8_t *signature) {
#if CODA_SIGNATURES
  return coda_ed25519_verify(key, message, size, signature);
#else
  (void)key, (void)message, (void)size, (void)signature;
  return -1;
#endif
}

static coda_code verify_signature(const coda_bundle *bundle, const uint8_t *key, coda_error *error) {
  if (key && !bundle->key)
    return coda_fail(error, CODA_ERROR_SIGNATURE, "bundle is not signed, and this program opens signed ones only");
  if (key && memcmp(key, bundle->key, CODA_KEY_BYTES) != 0)
    return coda_fail(error, CODA_ERROR_SIGNATURE, "bundle is signed with another key than the one of this program");
  if (!bundle->key)
    return CODA_OK;
  const int32_t valid = coda_signature_valid(bundle->key, bundle->header.data, bundle->header.size, bundle->signature);
  if (valid == 0)
    return coda_fail(error, CODA_ERROR_SIGNATURE, "bundle's signature is wrong: it was altered after it was signed");
  if (valid < 0 && key)
    return coda_fail(error, CODA_ERROR_SIGNATURE,
                     "this runtime was built without signatures (CODA_SIGNATURES): it cannot check a key");
  return CODA_OK;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static const char *level_name(const coda_level *level) { return coda_section_string(&level->target, 0); }

static bool for_gpu(const coda_level *level) {
  const char *feature = coda_section_string(&level->target, 1);
  return feature && strcmp(feature, CODA_CUDA_FEATURE) == 0;
}

static coda_code check_level(coda_model *model, const coda_level *level, int32_t device, coda_error *error) {
  origin *o = model->origin;
  if (for_gpu(level))
    return coda_cuda_open(&level->library, device, &model->allocator, &o->cuda, error);
  coda_code code = coda_library_check(&level->library, error);
  return code ? code : coda_model_check_features(&level->target, error);
}

/* The level that was asked for, or else the last one that runs here. */
static coda_code choose_level(coda_model *model, const char *target, int32_t device, coda_error *error) {
  origin *o = model->origin;
  char names[256] = "";
  coda_code code = CODA_OK;
  for (uint32_t i = o->bundle.level_count; i-- > 0;)
    model->held[i] = level_name(&o->bundle.levels[i]);
  for (uint32_t i = o->bundle.level_count; i-- > 0 && !o->level;) {
    const coda_level *level = &o->bundle.levels[i];
    const size_t used = strlen(names);
    coda_print(names + used, sizeof names - used, "%s'%s'", used ? ", " : "", level_name(level));
    if (target && strcmp(target, level_name(level)) != 0)
      continue;
    code = check_level(model, level, device, error);
    if (!code)
      o->level = level;
    if (target || (code && code != CODA_ERROR_TARGET))
      return code;
  }
  if (target)
    return coda_fail(error, CODA_ERROR_TARGET, "bundle holds no kernels for '%s', but for %s", target, names);
  return o->level ? CODA_OK : code;
}

static coda_code load_kernels(coda_model *model, coda_error *error) {
  origin *o = model->origin;
  const coda_plan *plan = &model->plan;
  if (!plan->kernel_count) /* a plan of no steps has no library either */
    return CODA_OK;
  if (o->cuda)
    return CODA_OK;
  coda_code code = coda_library_open(&o->library, &o->level->library, error);
  for (uint32_t i = 0; i < plan->kernel_count && !code; i++) {
    model->kernels[i] = coda_library_kernel(&o->library, plan->kernels[i]);
    if (!model->kernels[i])
      code = coda_fail(error, CODA_ERROR_BUNDLE, "bundle's kernel library has no kernel '%s'", plan->kernels[i]);
  }
  return code;
}

static coda_code load(coda_model *model, const coda_model_options *options, coda_error *error) {
  origin *o = model->origin;
  coda_code code = coda_bundle_read(o->data, o->size, &o->bundle, error);
  if (!code)
    code = verify_signature(&o->bundle, options->key, error);
  if (!code)
    code = choose_level(model, options->target, options->device, error);
  if (code)
    return code;
  model->target = o->level->target;
  model->metadata = o->bundle.metadata;
  model->constants = o->bundle.constants;
  model->verify = verify_constants;
  if (options->key || options->verify > 0)
    code = verify_constants(model, NULL, &model->allocator, error);
  if (options->key || options->verify)
    atomic_store(&model->verified, true);
  if (!code)
    code = coda_model_parse(model, &o->level->plan, error);
  if (!code)
    code = load_kernels(model, error);
  if (!code)
    code = coda_model_repack(model, error);
  if (!code && o->cuda)
    code = coda_cuda_load(o->cuda, model, error);
  return code;
}

/* Takes over what `given` holds, also when it fails. */
static coda_code open_origin(origin *given, const coda_model_options *options, coda_model **result, coda_error *error) {
  coda_model *model = NULL;
  coda_code code = coda_model_make(options, &model, error);
  given->library = CODA_LIBRARY_NONE;
  if (!code) {
    model->origin = model->allocator.allocate(model->allocator.context, sizeof *given, ALIGNMENT);
    if (!model->origin)
      code = coda_fail(error, CODA_ERROR_MEMORY, "no memory for a model");
  }
  if (code) {
    release(given, model                ? &model->allocator
                   : options->allocator ? options->allocator
                                        : coda_default_allocator);
    coda_model_free(model);
    return code;
  }
  memcpy(model->origin, given, sizeof *given);
  model->close = close_origin;
  code = load(model, options, error);
  if (code)
    coda_model_free(model);
  else
    *result = model;
  return code;
}

coda_code coda_model_open_memory(const void *data, size_t size, const coda_model_options *given, coda_model **model,
                                 coda_error *error) {
  if (!data || !model)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open_memory needs data and a place for the model");
  *model = NULL;
  if ((uintptr_t)data % ALIGNMENT != 0)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "a bundle in memory must begin at a multiple of %d bytes", ALIGNMENT);
  const coda_model_options options = coda_model_read_options(given);
  origin o = {.data = data, .size = size};
  return open_origin(&o, &options, model, error);
}

coda_code coda_model_open_fd(int file, uint64_t offset, uint64_t length, const coda_model_options *given,
                             coda_model **model, coda_error *error) {
  struct stat status;
  if (!model)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open_fd needs a place for the model");
  *model = NULL;
  if (fstat(file, &status) != 0)
    return coda_fail(error, CODA_ERROR_FILE, "bundle cannot be opened: %s", strerror(errno));
  if (!S_ISREG(status.st_mode))
    return coda_fail(error, CODA_ERROR_FILE, "bundle cannot be opened: not a regular file");
  const uint64_t end = (uint64_t)status.st_size;
  if (offset > end || length > end - offset)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "%" PRIu64 " bytes from %" PRIu64 " are beyond a file of %" PRIu64,
                     length, offset, end);
  if (!length)
    length = end - offset;
  if (!length)
    return coda_fail(error, CODA_ERROR_BUNDLE, "bundle is empty");
  const coda_model_options options = coda_model_read_options(given);
  const uint64_t before = offset % (uint64_t)sysconf(_SC_PAGESIZE);
  origin o = {.size = (size_t)length, .mapped = (size_t)(length + before)};
  void *mapping = o.mapped == length + before
                      ? mmap(NULL, o.mapped, PROT_READ, MAP_PRIVATE, file, (off_t)(offset - before))
                      : MAP_FAILED;
  if (mapping == MAP_FAILED)
    return coda_fail(error, CODA_ERROR_FILE, "bundle cannot be mapped: %s", strerror(errno));
  o.mapping = mapping;
  o.data = (const uint8_t *)mapping + before;
  /* Where the system keeps files in large pages, it maps them as such if it knows before it reads. */
  madvise(mapping, o.mapped, MADV_HUGEPAGE);
  madvise(mapping, o.mapped, MADV_WILLNEED);
  if (before % ALIGNMENT != 0) {
    const coda_allocator *allocator = options.allocator ? options.allocator : coda_default_allocator;
    if (coda_block_reserve(&o.copy, o.size, ALIGNMENT, allocator)) {
      release(&o, allocator);
      return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a copy of %zu bytes, as the bundle is not aligned",
                       o.size);
    }
    memcpy(o.copy.data, o.data, o.size);
    o.data = o.copy.data;
  }
  return open_origin(&o, &options, model, error);
}

coda_code coda_model_open(const char *path, const coda_model_options *options, coda_model **model, coda_error *error) {
  if (!path || !model)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_model_open needs a path and a place for the model");
  *model = NULL;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return coda_fail(error, CODA_ERROR_FILE, "bundle '%s' cannot be opened: %s", path, strerror(errno));
  coda_error inner;
  const coda_code code = coda_model_open_fd(file, 0, 0, options, model, &inner);
  close(file);
  return code ? coda_fail(error, code, "%s: %s", path, inner.message) : CODA_OK;
}
