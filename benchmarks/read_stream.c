/* How fast one core reads: sums over `count` floats, `rounds` times, in the order that serves a cache and in the one that serves memory. */
#include <stdint.h>

typedef float vec __attribute__((vector_size(64), aligned(64)));

#define CHAINS 4
#define STREAMS 8
/* Floats that a stream is asked for ahead: two pages, so that prefetchers are there when a page begins. */
#define AHEAD 2048

static float total(const vec *sums, int count) {
  float sum = 0;
  for (int i = 0; i < count; i++)
    for (int lane = 0; lane < 16; lane++) sum += sums[i][lane];
  return sum;
}

/* In one go; `count` is a multiple of 64. */
float read_cache(const float *data, int64_t count, int64_t rounds) {
  vec sums[CHAINS] = {{0}};
  for (int64_t r = 0; r < rounds; r++) {
    for (const float *at = data, *end = data + count; at != end; at += CHAINS * 16)
      for (int i = 0; i < CHAINS; i++) sums[i] += *(const vec *)(at + i * 16);
    __asm__ volatile("" ::: "memory");
  }
  return total(sums, CHAINS);
}

/* From several places side by side, fetched ahead: more requests under way. `count` is a multiple of 128. */
float read_memory(const float *data, int64_t count, int64_t rounds) {
  vec sums[STREAMS] = {{0}};
  const int64_t part = count / STREAMS;
  for (int64_t r = 0; r < rounds; r++) {
    for (int64_t at = 0; at < part; at += 16)
#pragma GCC unroll 8
      for (int i = 0; i < STREAMS; i++) {
        __builtin_prefetch(data + i * part + at + AHEAD);
        sums[i] += *(const vec *)(data + i * part + at);
      }
    __asm__ volatile("" ::: "memory");
  }
  return total(sums, STREAMS);
}
