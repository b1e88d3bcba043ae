/* What the core of the runtime asks of where it runs: these, and the pool. src/posix answers with an operating system,
 * src/bare without one. */
#ifndef CODA_PLATFORM_H
#define CODA_PLATFORM_H

#include "coda.h"

/* The allocator that is used where the caller gives none; NULL where there is none. */
extern const coda_allocator *const coda_default_allocator;

/* Nanoseconds since some moment of the past; always 0 where there is no clock. */
int64_t coda_clock_ns(void);

/* A number to begin random ones with, which is no secret. */
uint64_t coda_entropy(void);

#endif
