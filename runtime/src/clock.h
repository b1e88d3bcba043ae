/* The time that steps and spinning are measured in. */
#ifndef CODA_CLOCK_H
#define CODA_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds since some moment of the past. */
static inline int64_t coda_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
