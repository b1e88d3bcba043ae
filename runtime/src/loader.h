/* Loads the kernels of a bundle from memory. */
#ifndef CODA_LOADER_H
#define CODA_LOADER_H

#include "error.h"
#include "section.h"

typedef struct {
  void *handle;
  int file;
} coda_library;

#define CODA_LIBRARY_NONE ((coda_library){NULL, -1})

/* Whether a shared object is for this machine; an empty one, of a plan without kernels, is for every one. */
coda_code coda_library_check(const coda_section *section, coda_error *error);

/* Loads a shared object, after checking that it is for this machine. */
coda_code coda_library_open(coda_library *library, const coda_section *section, coda_error *error);

/* The kernel of that name; NULL when there is none. */
coda_kernel coda_library_kernel(const coda_library *library, const char *name);

void coda_library_close(coda_library *library);

#endif
