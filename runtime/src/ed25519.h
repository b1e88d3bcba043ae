/* Verification of Ed25519 signatures (RFC 8032). */
#ifndef CODA_ED25519_H
#define CODA_ED25519_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef CODA_SIGNATURES
#define CODA_SIGNATURES 1 /* 0: the runtime is built without */
#endif

/* Whether `signature`, of 64 bytes, is that of message[0, size) by the owner of `key`, of 32 bytes. Nothing of it is
 * secret: its time depends on its operands. */
bool coda_ed25519_verify(const uint8_t *key, const uint8_t *message, size_t size, const uint8_t *signature);

#endif
