/* Whether a graph is what a bundle was compiled from: by the model file's digest where the file is known, or else by
 * all constants that the graph still has by their names.
 *
 * The fingerprint of a constant is the sum of a hash of each element, so that it stays the same when onnxruntime
 * transposes or reshapes it. coda_edge/fingerprint.py writes the same ones into the bundle. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "provider.h"
#include "sha256.h"

enum { PIECE_BYTES = 1 << 22 };

bool file_digest(const char *path, char hex[65]) {
  struct stat info;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  const bool usable = file >= 0 && fstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0;
  const size_t size = usable ? (size_t)info.st_size : 0, pieces = (size + PIECE_BYTES - 1) / PIECE_BYTES;
  uint8_t *digests = malloc(pieces * CODA_SHA256_BYTES + 1), whole[CODA_SHA256_BYTES];
  bool good = usable && digests;
  for (size_t i = 0; i < pieces && good; i++) {
    const size_t offset = i * PIECE_BYTES, length = size - offset < PIECE_BYTES ? size - offset : PIECE_BYTES;
    void *data = mmap(NULL, length, PROT_READ, MAP_PRIVATE, file, (off_t)offset);
    good = data != MAP_FAILED;
    if (good) {
      coda_sha256(data, length, digests + i * CODA_SHA256_BYTES);
      munmap(data, length);
    }
  }
  if (file >= 0)
    close(file);
  if (good) {
    coda_sha256(digests, pieces * CODA_SHA256_BYTES, whole);
    for (size_t i = 0; i < sizeof whole; i++)
      snprintf(hex + 2 * i, 3, "%02x", whole[i]);
  }
  free(digests);
  return good;
}

/* FNV-1a. */
static uint64_t hash_name(const char *name) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (; *name; name++)
    hash = (hash ^ (uint8_t)*name) * UINT64_C(0x100000001b3);
  return hash;
}

static uint64_t mix(uint64_t x) {
  x = (x + UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 32)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 29);
}

#define SUM(type)                                                                                                      \
  for (size_t i = 0; i < bytes / sizeof(type); i++) {                                                                  \
    type x;                                                                                                            \
    memcpy(&x, (const uint8_t *)data + i * sizeof x, sizeof x);                                                        \
    sum += mix(x);                                                                                                     \
  }

static uint64_t fingerprint(const void *data, size_t bytes, int dtype) {
  uint64_t sum = 0;
  const size_t size = coda_dtype_size(dtype);
  if (size == 8)
    SUM(uint64_t)
  else if (size == 4)
    SUM(uint32_t)
  else if (size == 2)
    SUM(uint16_t)
  else
    SUM(uint8_t)
  return sum;
}

/* A constant of the graph: its type, and its fingerprint. */
static OrtStatus *read_constant(const OrtApi *ort, const OrtValueInfo *info, uint64_t *print, size_t *bytes) {
  const OrtValue *value;
  OrtTensorTypeAndShapeInfo *type;
  void *data;
  int dtype;
  *bytes = 0;
  TRY(ort->ValueInfo_GetInitializerValue(info, &value));
  TRY(ort->GetTensorTypeAndShape(value, &type));
  OrtStatus *status = ort->GetTensorElementType(type, &dtype);
  ort->ReleaseTensorTypeAndShapeInfo(type);
  TRY(status);
  if (dtype == 8) /* text: no bundle has any */
    return NULL;
  TRY(ort->GetTensorSizeInBytes(value, bytes));
  TRY(ort->GetTensorMutableData((OrtValue *)value, &data));
  *print = fingerprint(data, *bytes, dtype);
  return NULL;
}

/* Finds a name's fingerprint among those of a bundle: "<name><print> …", 16 hexadecimal digits each, ordered by name.
 */
static bool find_print(const char *prints, uint64_t name, uint64_t *print) {
  enum { ENTRY = 33 };
  size_t low = 0, high = (strlen(prints) + 1) / ENTRY;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    uint64_t found;
    if (sscanf(prints + middle * ENTRY, "%16" SCNx64 "%16" SCNx64, &found, print) != 2)
      return false;
    if (found == name)
      return true;
    if (found < name)
      low = middle + 1;
    else
      high = middle;
  }
  return false;
}

static OrtStatus *is_external(const OrtApi *ort, const OrtValueInfo *constant, bool *external) {
  OrtExternalInitializerInfo *info = NULL;
  TRY(ort->ValueInfo_GetExternalInitializerInfo(constant, &info));
  *external = info != NULL;
  if (info)
    ort->ReleaseExternalInitializerInfo(info);
  return NULL;
}

/* Compares the region's constants with the bundle's, or of these only those that lie outside of the model's file. */
static OrtStatus *compare_constants(const provider *p, const region *r, const char *prints, bool external_only,
                                    char reason[REASON_BYTES]) {
  size_t all = 0, same = 0;
  for (size_t i = 0; i < r->constant_count && !*reason; i++) {
    const char *name;
    uint64_t print = 0, expected;
    size_t bytes;
    bool external = true;
    if (external_only)
      TRY(is_external(p->api.ort, r->constants[i], &external));
    if (!external)
      continue;
    TRY(value_name(&p->api, r->constants[i], &name));
    TRY(read_constant(p->api.ort, r->constants[i], &print, &bytes));
    all += bytes;
    if (!find_print(prints, hash_name(name), &expected))
      continue;
    if (print == expected)
      same += bytes;
    else
      snprintf(reason, REASON_BYTES, "the constant '%s' has other values in the model", name);
  }
  if (!*reason && same < all / 2)
    snprintf(reason, REASON_BYTES, "of %zu bytes of constants in the model, the bundle was compiled from %zu", all,
             same);
  return NULL;
}

OrtStatus *identity_check(const provider *p, const OrtGraph *graph, const region *r, const bundle *b,
                          char reason[REASON_BYTES]) {
  const char *path = NULL, *source = bundle_metadata(b, "model_digest"), *prints = bundle_metadata(b, "constants");
  char digest[65];
  *reason = 0;
  if (!prints) {
    snprintf(reason, REASON_BYTES, "it does not record the model's constants, so that there is no telling");
    return NULL;
  }
  TRY(p->api.ort->Graph_GetModelPath(graph, &path));
  const bool known = r->whole && source && path && *path && file_digest(path, digest);
  const bool same = known && strcmp(digest, source) == 0;
  TRY(compare_constants(p, r, prints, same, reason));
  if (known && !same && !*reason)
    tell(p, ORT_LOG_WARNING, "%s: '%s' is not the file that it was compiled from, but has the same constants", b->path,
         path);
  return NULL;
}
