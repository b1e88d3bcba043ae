/* The container of a bundle: header, sections, checksums, signature. */
#ifndef CODA_BUNDLE_H
#define CODA_BUNDLE_H

#include "error.h"
#include "model.h"

enum { CODA_CONSTANT_BLOCK = 1 << 20 /* bytes of constants that have a checksum of their own */ };

/* What of a bundle is for one target. */
typedef struct {
  coda_section plan, target, library; /* target: its name, then the CPU features that its kernels need */
} coda_level;

typedef struct {
  coda_section metadata, constants;
  const uint8_t *constants_digest; /* the SHA-256 of those of all blocks of constants */
  const uint8_t *key, *signature; /* NULL where it is not signed; what is signed is the header */
  coda_section header; /* up to its checksum, included */
  coda_level levels[CODA_MAX_LEVELS]; /* best last */
  uint32_t level_count;
} coda_bundle;

/* Finds the sections of the bundle at data[0, size) and verifies every byte of it but those of the constants. */
coda_code coda_bundle_read(const uint8_t *data, size_t size, coda_bundle *bundle, coda_error *error);

#endif
