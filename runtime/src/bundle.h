/* The container of a bundle: header, sections, checksums. */
#ifndef CODA_BUNDLE_H
#define CODA_BUNDLE_H

#include "error.h"

typedef enum {
  SECTION_PLAN,
  SECTION_FEATURES,
  SECTION_METADATA,
  SECTION_LIBRARY,
  SECTION_CONSTANTS,
  SECTION_COUNT
} section_kind;

typedef struct {
  const uint8_t *data;
  size_t size;
} coda_section;

/* Finds the sections of the bundle at data[0, size) and verifies every byte of it. */
coda_code coda_bundle_read(const uint8_t *data, size_t size, coda_section sections[SECTION_COUNT], coda_error *error);

/* Whether a section is a sequence of strings, each with its zero byte. */
int coda_section_is_strings(const coda_section *section);

/* String `index` of such a section; NULL when there is none. */
const char *coda_section_string(const coda_section *section, size_t index);

#endif
