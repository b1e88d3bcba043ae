/* Versions of the library. */
#include "coda.h"

uint32_t coda_abi_version(void) { return CODA_ABI_VERSION; }

const char *coda_version(void) { return CODA_VERSION_TEXT; }
