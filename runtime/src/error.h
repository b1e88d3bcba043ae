/* How every function of the runtime reports a failure. */
#ifndef CODA_ERROR_H
#define CODA_ERROR_H

#include "coda.h"

/* Fills `error` (unless NULL) and returns `code`, so that a caller can write `return coda_fail(...)`. */
#ifdef __GNUC__
__attribute__((format(printf, 3, 4)))
#endif
coda_code coda_fail(coda_error *error, coda_code code, const char *format, ...);

#endif
