/* Features of this CPU by the names that compilers use for them. */
#include "cpu.h"

#include <stdint.h>
#include <string.h>

#include "coda.h"

typedef struct {
  const char *name;
  uint8_t word; /* which of the words that `read_words` fills */
  uint8_t bit;
  uint8_t state; /* the register state that the operating system must save for it */
} feature;

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

/* Words: 0 leaf 1 ecx, 1 leaf 7 ebx, 2 leaf 7 ecx, 3 leaf 7 edx, 4 leaf 7.1 eax, 5 leaf 0x80000001 ecx.
 * Bits: Intel SDM vol. 2A, CPUID. */
enum { WORDS = 6, STATE_NONE = 0, STATE_YMM = 0x06, STATE_ZMM = 0xe6 };

static const feature FEATURES[] = {
    {"sse3", 0, 0, STATE_NONE},        {"ssse3", 0, 9, STATE_NONE},       {"sse4_1", 0, 19, STATE_NONE},
    {"sse4_2", 0, 20, STATE_NONE},     {"popcnt", 0, 23, STATE_NONE},     {"f16c", 0, 29, STATE_YMM},
    {"avx", 0, 28, STATE_YMM},         {"fma", 0, 12, STATE_YMM},         {"avx2", 1, 5, STATE_YMM},
    {"bmi1", 1, 3, STATE_NONE},        {"bmi2", 1, 8, STATE_NONE},        {"lzcnt", 5, 5, STATE_NONE},
    {"movbe", 0, 22, STATE_NONE},      {"avx512f", 1, 16, STATE_ZMM},     {"avx512dq", 1, 17, STATE_ZMM},
    {"avx512cd", 1, 28, STATE_ZMM},    {"avx512bw", 1, 30, STATE_ZMM},    {"avx512vl", 1, 31, STATE_ZMM},
    {"avx512_vbmi", 2, 1, STATE_ZMM},  {"avx512_vnni", 2, 11, STATE_ZMM}, {"avx512_bf16", 4, 5, STATE_ZMM},
    {"avx512_fp16", 3, 23, STATE_ZMM}, {"avx_vnni", 4, 4, STATE_YMM},     {"sha_ni", 1, 29, STATE_NONE},
};

static uint32_t saved_state(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

static uint32_t read_words(uint32_t words[WORDS]) {
  const uint32_t last = (uint32_t)__get_cpuid_max(0, NULL), extended = (uint32_t)__get_cpuid_max(0x80000000u, NULL);
  uint32_t a, b, c, d;
  uint32_t state = 0;
  memset(words, 0, WORDS * sizeof *words);
  if (last >= 1) {
    __cpuid(1, a, b, c, d);
    words[0] = c;
    if (c & (1u << 27)) /* OSXSAVE */
      state = saved_state();
  }
  if (last >= 7) {
    __cpuid_count(7, 0, a, b, c, d);
    words[1] = b, words[2] = c, words[3] = d;
    if (a >= 1) {
      __cpuid_count(7, 1, a, b, c, d);
      words[4] = a;
    }
  }
  if (extended >= 0x80000001u) {
    __cpuid(0x80000001u, a, b, c, d);
    words[5] = c;
  }
  return state;
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

/* Words: 0 AT_HWCAP, 1 AT_HWCAP2 (low 32 bits). Bits: Linux arch/arm64 uapi asm/hwcap.h. */
enum { WORDS = 2 };

static const feature FEATURES[] = {
    {"asimd", 0, 1, 0}, {"sha2", 0, 6, 0},  {"fp16", 0, 10, 0}, {"dotprod", 0, 20, 0}, {"sve", 0, 22, 0},
    {"sve2", 1, 1, 0},  {"i8mm", 1, 13, 0}, {"bf16", 1, 14, 0},    {"sme", 1, 23, 0},
};

static uint32_t read_words(uint32_t words[WORDS]) {
  words[0] = (uint32_t)getauxval(AT_HWCAP);
  words[1] = (uint32_t)getauxval(AT_HWCAP2);
  return 0;
}

#elif defined(__arm__) || defined(__riscv)
#include <sys/auxv.h>

/* Word 0: AT_HWCAP. Bits: Linux arch/arm uapi asm/hwcap.h; on RISC-V one for each letter of the ISA string. */
enum { WORDS = 1 };

static const feature FEATURES[] = {
#ifdef __arm__
    {"neon", 0, 12, 0},
    {"vfpv4", 0, 16, 0},
#else
    {"m", 0, 'm' - 'a', 0}, {"a", 0, 'a' - 'a', 0}, {"f", 0, 'f' - 'a', 0},
    {"d", 0, 'd' - 'a', 0}, {"c", 0, 'c' - 'a', 0}, {"v", 0, 'v' - 'a', 0},
#endif
};

static uint32_t read_words(uint32_t words[WORDS]) {
  words[0] = (uint32_t)getauxval(AT_HWCAP);
  return 0;
}

#else
enum { WORDS = 1 };

static const feature FEATURES[] = {{NULL, 0, 0, 0}};

static uint32_t read_words(uint32_t words[WORDS]) {
  words[0] = 0;
  return 0;
}
#endif

enum { FEATURE_COUNT = sizeof FEATURES / sizeof *FEATURES };

static bool present(const feature *f, const uint32_t *words, uint32_t state) {
  return f->name && (words[f->word] >> f->bit & 1u) && (state & f->state) == f->state;
}

bool coda_cpu_has(const char *name) {
  uint32_t words[WORDS];
  uint32_t state = read_words(words);
  for (size_t i = 0; i < FEATURE_COUNT; i++)
    if (present(&FEATURES[i], words, state) && strcmp(FEATURES[i].name, name) == 0)
      return true;
  return false;
}

size_t coda_cpu_features(const char **names, size_t capacity) {
  uint32_t words[WORDS];
  uint32_t state = read_words(words);
  size_t count = 0;
  for (size_t i = 0; i < FEATURE_COUNT; i++) {
    if (!present(&FEATURES[i], words, state))
      continue;
    if (count < capacity)
      names[count] = FEATURES[i].name;
    count++;
  }
  return count;
}
