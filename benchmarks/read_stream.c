/* How fast one core reads: a sum over `count` floats (a multiple of 64) in several independent vectors, `rounds` times. */
#include <stdint.h>

typedef float vec __attribute__((vector_size(64), aligned(64)));

#define CHAINS 4

float read_stream(const float *data, int64_t count, int64_t rounds) {
  vec sums[CHAINS] = {{0}};
  for (int64_t r = 0; r < rounds; r++) {
    for (const float *at = data, *end = data + count; at != end; at += CHAINS * 16)
      for (int i = 0; i < CHAINS; i++) sums[i] += *(const vec *)(at + i * 16);
    __asm__ volatile("" ::: "memory");
  }
  float total = 0;
  for (int i = 0; i < CHAINS; i++)
    for (int lane = 0; lane < 16; lane++) total += sums[i][lane];
  return total;
}
