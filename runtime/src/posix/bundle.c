/* Reads the container that docs/bundle-format.md specifies. Every bit of the file is covered: the header by its own
 * checksum, sections by theirs, and the padding between them must be zero. Constants are verified later, by whoever
 * uses them. */
#include "bundle.h"

#include <string.h>

#include "bytes.h"
#include "sha256.h"
#include "text.h"

enum {
  VERSION = 5,
  PREFIX = 32,
  ENTRY = 56,
  ALIGNMENT = 64,
  PAGE = 4096,
  KEY = 32,
  SIGNATURE = 64,
};

static const uint8_t MAGIC[8] = {'C', 'O', 'D', 'A', '\r', '\n', 0x1a, '\n'};

/* Kinds of sections. The first three are there for each level. */
enum { PLAN, TARGET, LIBRARY, METADATA, CONSTANTS, KINDS, KINDS_OF_LEVEL = METADATA, KINDS_OF_FILE = KINDS - METADATA };

static const char *const NAMES[KINDS] = {"plan", "target", "library", "metadata", "constants"};

#define BAD(...) coda_fail(error, CODA_ERROR_BUNDLE, __VA_ARGS__)

static int digest_differs(coda_sha256_compress compress, const uint8_t *data, size_t size, const uint8_t *expected) {
  uint8_t digest[CODA_SHA256_BYTES];
  coda_sha256_by(compress, data, size, digest);
  return memcmp(digest, expected, sizeof digest) != 0;
}

static int all_zero(const uint8_t *data, size_t size) {
  for (size_t i = 0; i < size; i++)
    if (data[i])
      return 0;
  return 1;
}

/* Checks all before the sections, which begin at byte `end`. */
static coda_code check_header(const uint8_t *data, size_t size, coda_sha256_compress compress, coda_bundle *bundle,
                              size_t *end, coda_error *error) {
  if (size < sizeof MAGIC || memcmp(data, MAGIC, sizeof MAGIC) != 0)
    return BAD("not a coda bundle: it does not begin with the bundle signature");
  if (size < PREFIX)
    return BAD("bundle is truncated: it has %zu bytes, its header alone needs %d", size, PREFIX);
  if (coda_u32(data + 8) != VERSION)
    return BAD("bundle has format version %" PRIu32
               ", this runtime reads version %d: build it again with a matching coda-edge",
               coda_u32(data + 8), VERSION);
  const uint32_t sections = coda_u32(data + 12), of_levels = sections - KINDS_OF_FILE;
  bundle->level_count = of_levels / KINDS_OF_LEVEL;
  if (sections < KINDS || of_levels % KINDS_OF_LEVEL != 0 || bundle->level_count > CODA_MAX_LEVELS)
    return BAD("bundle has %" PRIu32 " sections, expected %d and %d for each of 1 to %d levels", sections,
               KINDS_OF_FILE, KINDS_OF_LEVEL, CODA_MAX_LEVELS);
  const size_t table_end = PREFIX + ENTRY * (size_t)sections, signed_end = table_end + CODA_SHA256_BYTES;
  *end = signed_end + KEY + SIGNATURE;
  if (size < *end)
    return BAD("bundle is truncated: it has %zu bytes, its header alone needs %zu", size, *end);
  if (coda_u64(data + 16) != size)
    return BAD("bundle is truncated or extended: it has %zu bytes, expected %" PRIu64, size, coda_u64(data + 16));
  if (digest_differs(compress, data, table_end, data + table_end))
    return BAD("bundle is damaged: the checksum of its header differs");
  if (coda_u64(data + 24) != 0)
    return BAD("bundle is invalid: the reserved field of its header is not 0");
  bundle->header = (coda_section){data, signed_end};
  bundle->key = bundle->signature = NULL;
  if (!all_zero(data + signed_end, KEY + SIGNATURE)) {
    bundle->key = data + signed_end;
    bundle->signature = data + signed_end + KEY;
  }
  return CODA_OK;
}

/* The section that entry `i` of the table must be. */
static coda_section *section_at(coda_bundle *bundle, uint32_t i, uint32_t *kind, uint32_t *level) {
  const uint32_t of_levels = bundle->level_count * KINDS_OF_LEVEL;
  const bool of_file = i >= of_levels;
  *kind = of_file ? METADATA + i - of_levels : i % KINDS_OF_LEVEL;
  *level = of_file ? 0 : i / KINDS_OF_LEVEL;
  coda_level *l = &bundle->levels[*level];
  coda_section *const sections[KINDS] = {&l->plan, &l->target, &l->library, &bundle->metadata, &bundle->constants};
  return sections[*kind];
}

coda_code coda_bundle_read(const uint8_t *data, size_t size, coda_bundle *bundle, coda_error *error) {
  const coda_sha256_compress compress = coda_sha256_best();
  size_t header = 0;
  if (check_header(data, size, compress, bundle, &header, error))
    return CODA_ERROR_BUNDLE;
  uint64_t end = header;
  for (uint32_t i = 0; i < bundle->level_count * KINDS_OF_LEVEL + KINDS_OF_FILE; i++) {
    uint32_t kind, level;
    coda_section *section = section_at(bundle, i, &kind, &level);
    const uint8_t *entry = data + PREFIX + ENTRY * (size_t)i;
    const uint64_t offset = coda_u64(entry + 8), bytes = coda_u64(entry + 16);
    const uint64_t alignment = kind == CONSTANTS ? PAGE : ALIGNMENT;
    if (coda_u32(entry) != kind || coda_u32(entry + 4) != level)
      return BAD("bundle is invalid: section %" PRIu32 " is of kind %" PRIu32 " and level %" PRIu32, i, coda_u32(entry),
                 coda_u32(entry + 4));
    if (offset % alignment != 0 || offset < end || offset - end >= alignment || offset > size || bytes > size - offset)
      return BAD("bundle is invalid: section '%s' is %" PRIu64 " bytes at %" PRIu64 ", after byte %" PRIu64 " of %zu",
                 NAMES[kind], bytes, offset, end, size);
    if (!all_zero(data + end, (size_t)(offset - end)))
      return BAD("bundle is damaged: the padding before section '%s' is not zero", NAMES[kind]);
    if (kind == CONSTANTS)
      bundle->constants_digest = entry + 24;
    else if (digest_differs(compress, data + offset, (size_t)bytes, entry + 24))
      return BAD("bundle is damaged: the checksum of section '%s' differs", NAMES[kind]);
    *section = (coda_section){data + offset, (size_t)bytes};
    end = offset + bytes;
  }
  if (end != size)
    return BAD("bundle is invalid: %" PRIu64 " bytes follow its last section", size - end);
  for (uint32_t i = 0; i < bundle->level_count; i++)
    if (!bundle->levels[i].target.size || !coda_section_is_strings(&bundle->levels[i].target))
      return BAD("bundle is invalid: the target of its level %" PRIu32 " does not end in a zero byte", i);
  if (!coda_section_is_strings(&bundle->metadata))
    return BAD("bundle is invalid: its metadata do not end in a zero byte");
  return CODA_OK;
}
