/* Arithmetic that tells when a result is beyond its type, in plain C: what compilers build in for this calls functions
 * of theirs on machines of 32 bits. Each returns whether the result is right. */
#ifndef CODA_CHECKED_H
#define CODA_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool coda_add_i64(int64_t a, int64_t b, int64_t *sum) {
  if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b)
    return false;
  *sum = a + b;
  return true;
}

static inline bool coda_mul_i64(int64_t a, int64_t b, int64_t *product) {
  const uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a, y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
  const bool negative = (a < 0) != (b < 0);
  const uint64_t most = (uint64_t)INT64_MAX + negative;
  if (x && y > most / x)
    return false;
  const uint64_t magnitude = x * y;
  *product = !negative ? (int64_t)magnitude : magnitude ? -(int64_t)(magnitude - 1) - 1 : 0;
  return true;
}

static inline bool coda_add_size(size_t a, size_t b, size_t *sum) {
  *sum = a + b;
  return *sum >= a;
}

static inline bool coda_mul_size(size_t a, size_t b, size_t *product) {
  if (a && b > SIZE_MAX / a)
    return false;
  *product = a * b;
  return true;
}

#endif
