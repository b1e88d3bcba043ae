/* Versions of the library. */
#include "coda.h"

#ifndef CODA_VERSION_TEXT
#define CODA_VERSION_TEXT "unknown"
#endif

uint32_t coda_abi_version(void) { return CODA_ABI_VERSION; }

const char *coda_version(void) { return CODA_VERSION_TEXT; }
