/* Text and bytes without a C library: of one, the core of the runtime needs memcpy and memset alone. */
#ifndef CODA_TEXT_H
#define CODA_TEXT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if __STDC_HOSTED__
#include <string.h>
#else
void *memcpy(void *restrict to, const void *restrict from, size_t bytes);
void *memset(void *to, int value, size_t bytes);
#endif

#if __STDC_HOSTED__ || !defined(__INT64_FMTd__)
#include <inttypes.h>
#else
#define PRId32 __INT32_FMTd__
#define PRIu32 __UINT32_FMTu__
#define PRId64 __INT64_FMTd__
#define PRIu64 __UINT64_FMTu__
#endif

size_t coda_length(const char *text);
bool coda_equal(const char *a, const char *b);
bool coda_same_bytes(const void *a, const void *b, size_t bytes);

/* Writes text as vsnprintf does, and cuts it at `capacity`, which is at least 1. Of conversions there are s, d and u,
 * with the lengths l, ll and z. */
void coda_print_list(char *text, size_t capacity, const char *format, va_list arguments);
#ifdef __GNUC__
__attribute__((format(printf, 3, 4)))
#endif
void coda_print(char *text, size_t capacity, const char *format, ...);

#endif
