/* The container of a bundle: header, sections, checksums. */
#ifndef CODA_BUNDLE_H
#define CODA_BUNDLE_H

#include "error.h"

enum { CODA_MAX_LEVELS = 16 };

typedef struct {
  const uint8_t *data;
  size_t size;
} coda_section;

/* What of a bundle is for one target. */
typedef struct {
  coda_section plan, target, library; /* target: its name, then the CPU features that its kernels need */
} coda_level;

typedef struct {
  coda_section metadata, constants;
  coda_level levels[CODA_MAX_LEVELS]; /* best last */
  uint32_t level_count;
} coda_bundle;

/* Finds the sections of the bundle at data[0, size) and verifies every byte of it. */
coda_code coda_bundle_read(const uint8_t *data, size_t size, coda_bundle *bundle, coda_error *error);

/* Whether a section is a sequence of strings, each with its zero byte. */
int coda_section_is_strings(const coda_section *section);

/* String `index` of such a section; NULL when there is none. */
const char *coda_section_string(const coda_section *section, size_t index);

#endif
