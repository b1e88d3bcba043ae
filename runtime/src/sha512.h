/* SHA-512 (FIPS 180-4) of bytes that come in parts. */
#ifndef CODA_SHA512_H
#define CODA_SHA512_H

#include <stddef.h>
#include <stdint.h>

enum { CODA_SHA512_BYTES = 64, CODA_SHA512_BLOCK = 128 };

typedef struct {
  uint64_t state[8];
  uint8_t block[CODA_SHA512_BLOCK]; /* what does not fill one yet */
  uint64_t bytes; /* of all parts */
} coda_sha512;

void coda_sha512_begin(coda_sha512 *hash);
void coda_sha512_add(coda_sha512 *hash, const uint8_t *data, size_t size);
void coda_sha512_end(coda_sha512 *hash, uint8_t digest[CODA_SHA512_BYTES]);

#endif
