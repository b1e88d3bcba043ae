/* What the CPU can do, by the names that compilers use for it. Other processors than x86 are taken to be what the
 * library was built for. */
#include <string.h>

#include "operators.h"

#if defined(__x86_64__)
#include <cpuid.h>

typedef struct {
  const char *name;
  uint32_t leaf, word, bit; /* word: eax, ebx, ecx, edx */
  uint32_t state; /* bits of XCR0 that the system must have set: registers that it saves */
} feature;

enum { EBX = 1, ECX = 2, EXTENDED = 0x80000001u, YMM = 0x6, ZMM = 0xe6 };
static const feature FEATURES[] = {
    {"sse3", 1, ECX, 0, 0},        {"ssse3", 1, ECX, 9, 0},       {"sse4_1", 1, ECX, 19, 0},
    {"sse4_2", 1, ECX, 20, 0},     {"movbe", 1, ECX, 22, 0},      {"popcnt", 1, ECX, 23, 0},
    {"fma", 1, ECX, 12, YMM},      {"avx", 1, ECX, 28, YMM},      {"f16c", 1, ECX, 29, YMM},
    {"bmi1", 7, EBX, 3, 0},        {"avx2", 7, EBX, 5, YMM},      {"bmi2", 7, EBX, 8, 0},
    {"avx512f", 7, EBX, 16, ZMM},  {"avx512dq", 7, EBX, 17, ZMM}, {"avx512cd", 7, EBX, 28, ZMM},
    {"avx512bw", 7, EBX, 30, ZMM}, {"avx512vl", 7, EBX, 31, ZMM}, {"lzcnt", EXTENDED, ECX, 5, 0},
};

static uint32_t enabled_state(void) {
  uint32_t words[4], low, high;
  if (!__get_cpuid(1, &words[0], &words[1], &words[2], &words[3]) || !(words[ECX] >> 27 & 1))
    return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

static bool present(const char *name) {
  for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++) {
    const feature *f = &FEATURES[i];
    uint32_t words[4];
    if (strcmp(f->name, name) == 0)
      return __get_cpuid_count(f->leaf, 0, &words[0], &words[1], &words[2], &words[3]) &&
             words[f->word] >> f->bit & 1 && (enabled_state() & f->state) == f->state;
  }
  return false;
}
#else
static bool present(const char *name) { return name != NULL; }
#endif

const char *coda_missing_feature(const char *const *features) {
  for (; *features; features++)
    if (!present(*features))
      return *features;
  return NULL;
}
