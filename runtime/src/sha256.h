/* SHA-256 (FIPS 180-4). */
#ifndef CODA_SHA256_H
#define CODA_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { CODA_SHA256_BYTES = 32 };

void coda_sha256(const void *data, size_t size, uint8_t digest[CODA_SHA256_BYTES]);

#endif
