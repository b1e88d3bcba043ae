/* The most float32 arithmetic that one core does: independent fused multiply-adds in registers. */
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define CHAINS 12 /* covers latency times ports, and leaves registers for the two operands */

typedef float vec __attribute__((vector_size(LANES * 4)));

/* Does `rounds` rounds and returns the floating-point operations done; `sink` keeps them from being optimised away. */
int64_t fma_peak(int64_t rounds, float *sink) {
  vec acc[CHAINS], scale = (vec){0} + sink[0], shift = (vec){0} + sink[1];
  for (int i = 0; i < CHAINS; i++) acc[i] = shift * (float)i;
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) acc[i] = acc[i] * scale + shift;
  }
  for (int i = 0; i < CHAINS; i++)
    for (int lane = 0; lane < LANES; lane++) sink[2] += acc[i][lane];
  return rounds * CHAINS * LANES * 2;
}
