/* A range of bytes of a bundle or of a linked model. */
#ifndef CODA_SECTION_H
#define CODA_SECTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  const uint8_t *data;
  size_t size;
} coda_section;

/* Whether a section is a sequence of strings, each with its zero byte. */
bool coda_section_is_strings(const coda_section *section);

/* String `index` of such a section; NULL when there is none. */
const char *coda_section_string(const coda_section *section, size_t index);

#endif
