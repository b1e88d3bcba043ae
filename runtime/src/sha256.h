/* SHA-256 (FIPS 180-4). */
#ifndef CODA_SHA256_H
#define CODA_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { CODA_SHA256_BYTES = 32 };

typedef void (*coda_sha256_compress)(uint32_t state[8], const uint8_t *data, size_t blocks);

/* The fastest way on this CPU. Who hashes often asks once: a virtual machine takes microseconds to tell what its CPU
 * has. */
coda_sha256_compress coda_sha256_best(void);

void coda_sha256_by(coda_sha256_compress compress, const void *data, size_t size, uint8_t digest[CODA_SHA256_BYTES]);

void coda_sha256(const void *data, size_t size, uint8_t digest[CODA_SHA256_BYTES]);

#endif
