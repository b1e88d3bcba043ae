/* coda.h: the C interface of the coda-edge runtime. */
#ifndef CODA_H
#define CODA_H

#include <stddef.h>
#include <stdint.h>

#if defined(CODA_BUILD)
#define CODA_API __attribute__((visibility("default")))
#else
#define CODA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface; it changes when a program compiled against an older header would break. */
#define CODA_ABI_VERSION 1

/* CODA_ABI_VERSION of the library in use. */
CODA_API uint32_t coda_abi_version(void);

/* The release, such as "0.1.0". Static. */
CODA_API const char *coda_version(void);

/* Names of the features of this CPU that bundles may ask for ("avx2", "fma", ...), into names[0, capacity).
 * Returns how many there are, which may be more than capacity. The strings are static. */
CODA_API size_t coda_cpu_features(const char **names, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
