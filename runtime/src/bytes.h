/* Little-endian fields of a bundle, at any alignment, on any machine. */
#ifndef CODA_BYTES_H
#define CODA_BYTES_H

#include <stdint.h>

static inline uint32_t coda_u32(const uint8_t *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t coda_u64(const uint8_t *p) { return (uint64_t)coda_u32(p) | (uint64_t)coda_u32(p + 4) << 32; }

#endif
