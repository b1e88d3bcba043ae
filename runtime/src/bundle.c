/* Reads the container that docs/bundle-format.md specifies. Every bit of the file is covered: the header by its own
 * checksum, sections by theirs, and the padding between them must be zero. */
#include "bundle.h"

#include <inttypes.h>
#include <string.h>

#include "bytes.h"
#include "sha256.h"

enum {
  VERSION = 3,
  PREFIX = 32,
  ENTRY = 56,
  TABLE_END = PREFIX + SECTION_COUNT * ENTRY,
  HEADER = TABLE_END + CODA_SHA256_BYTES,
  ALIGNMENT = 64,
  PAGE = 4096,
};

static const uint8_t MAGIC[8] = {'C', 'O', 'D', 'A', '\r', '\n', 0x1a, '\n'};
static const char *const NAMES[SECTION_COUNT] = {"plan", "features", "metadata", "library", "constants"};

#define BAD(...) coda_fail(error, CODA_ERROR_BUNDLE, __VA_ARGS__)

static int digest_differs(const uint8_t *data, size_t size, const uint8_t *expected) {
  uint8_t digest[CODA_SHA256_BYTES];
  coda_sha256(data, size, digest);
  return memcmp(digest, expected, sizeof digest) != 0;
}

static coda_code check_header(const uint8_t *data, size_t size, coda_error *error) {
  if (size < sizeof MAGIC || memcmp(data, MAGIC, sizeof MAGIC) != 0)
    return BAD("not a coda bundle: it does not begin with the bundle signature");
  if (size < HEADER)
    return BAD("bundle is truncated: it has %zu bytes, its header alone needs %d", size, HEADER);
  if (coda_u32(data + 8) != VERSION)
    return BAD("bundle has format version %" PRIu32
               ", this runtime reads version %d: build it again with a matching coda-edge",
               coda_u32(data + 8), VERSION);
  if (coda_u32(data + 12) != SECTION_COUNT)
    return BAD("bundle has %" PRIu32 " sections, expected %d", coda_u32(data + 12), SECTION_COUNT);
  if (coda_u64(data + 16) != size)
    return BAD("bundle is truncated or extended: it has %zu bytes, expected %" PRIu64, size, coda_u64(data + 16));
  if (digest_differs(data, TABLE_END, data + TABLE_END))
    return BAD("bundle is damaged: the checksum of its header differs");
  if (coda_u64(data + 24) != 0)
    return BAD("bundle is invalid: the reserved field of its header is not 0");
  return CODA_OK;
}

static int all_zero(const uint8_t *data, size_t size) {
  for (size_t i = 0; i < size; i++)
    if (data[i])
      return 0;
  return 1;
}

coda_code coda_bundle_read(const uint8_t *data, size_t size, coda_section sections[SECTION_COUNT], coda_error *error) {
  if (check_header(data, size, error))
    return CODA_ERROR_BUNDLE;
  uint64_t end = HEADER;
  for (uint32_t i = 0; i < SECTION_COUNT; i++) {
    const uint8_t *entry = data + PREFIX + ENTRY * (size_t)i;
    const uint64_t offset = coda_u64(entry + 8), bytes = coda_u64(entry + 16);
    const uint64_t alignment = i == SECTION_CONSTANTS ? PAGE : ALIGNMENT;
    if (coda_u32(entry) != i || coda_u32(entry + 4) != 0)
      return BAD("bundle is invalid: section %" PRIu32 " is of kind %" PRIu32, i, coda_u32(entry));
    if (offset % alignment != 0 || offset < end || offset - end >= alignment || offset > size || bytes > size - offset)
      return BAD("bundle is invalid: section '%s' is %" PRIu64 " bytes at %" PRIu64 ", after byte %" PRIu64 " of %zu",
                 NAMES[i], bytes, offset, end, size);
    if (!all_zero(data + end, (size_t)(offset - end)))
      return BAD("bundle is damaged: the padding before section '%s' is not zero", NAMES[i]);
    if (digest_differs(data + offset, (size_t)bytes, entry + 24))
      return BAD("bundle is damaged: the checksum of section '%s' differs", NAMES[i]);
    sections[i] = (coda_section){data + offset, (size_t)bytes};
    end = offset + bytes;
  }
  if (end != size)
    return BAD("bundle is invalid: %" PRIu64 " bytes follow its last section", size - end);
  return CODA_OK;
}

int coda_section_is_strings(const coda_section *section) {
  return section->size == 0 || section->data[section->size - 1] == 0;
}

const char *coda_section_string(const coda_section *section, size_t index) {
  const char *text = (const char *)section->data, *const end = text + section->size;
  for (; index && text < end; index--)
    text += strlen(text) + 1;
  return text < end ? text : NULL;
}
