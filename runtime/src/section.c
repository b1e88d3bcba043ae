/* Sections that are texts. */
#include "section.h"

#include "text.h"

bool coda_section_is_strings(const coda_section *section) {
  return section->size == 0 || section->data[section->size - 1] == 0;
}

const char *coda_section_string(const coda_section *section, size_t index) {
  const char *text = (const char *)section->data, *const end = text + section->size;
  for (; index && text < end; index--)
    text += coda_length(text) + 1;
  return text < end ? text : NULL;
}
