/* Parts of the check program: what it counts, and its checks of the runtime's insides. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>

extern int failures;

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      failures++;                                                                                                      \
      printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                                   \
    }                                                                                                                  \
  } while (0)

/* Loops: each item once, balanced chunks, small loops by the caller alone, workers that the system does not run. */
void check_pool(void);

/* What a program hands to the runtime, on the bundle of the encoder at `path`. */
void check_api(const char *path);

/* How many threads a session gets by default, by made-up files of the system. */
void check_cores(void);

#endif
