/* SHA-256 (FIPS 180-4), with the SHA instructions of x86-64 and 64-bit Arm where the CPU has them: all of a bundle is
 * hashed. */
#include "sha256.h"

#include <string.h>

#include "cpu.h"

enum { BLOCK = 64 };

/* FIPS 180-4, section 4.2.2. */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t load_be(const uint8_t *p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be(uint8_t *p, uint32_t x) {
  for (int i = 0; i < 4; i++)
    p[i] = (uint8_t)(x >> (24 - 8 * i));
}

static void compress_generic(uint32_t state[8], const uint8_t *data, size_t blocks) {
  for (; blocks; blocks--, data += BLOCK) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
      w[i] = load_be(data + 4 * i);
    for (int i = 16; i < 64; i++) {
      uint32_t low = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      uint32_t high = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
      uint32_t a = s[0], e = s[4];
      uint32_t t1 = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + K[i] + w[i];
      uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      memmove(s + 1, s, 7 * sizeof *s);
      s[4] += t1;
      s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
      state[i] += s[i];
  }
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Intel SDM vol. 2B, SHA256RNDS2/MSG1/MSG2: the state is held as (ABEF, CDGH); each RNDS2 does two rounds. */
__attribute__((target("sha,ssse3,sse4.1"))) static void compress_sha_ni(uint32_t state[8], const uint8_t *data,
                                                                        size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i abef = _mm_set_epi32((int)state[0], (int)state[1], (int)state[4], (int)state[5]);
  __m128i cdgh = _mm_set_epi32((int)state[2], (int)state[3], (int)state[6], (int)state[7]);
  for (; blocks; blocks--, data += BLOCK) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; i++)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const __m128i now = w[i & 3];
      const __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
      if (i < 12) { /* words 4i+16 .. 4i+19 replace words 4i .. 4i+3 */
        const __m128i before = w[(i + 3) & 3], middle = w[(i + 2) & 3];
        const __m128i seven_back = _mm_alignr_epi8(before, middle, 4);
        const __m128i low = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
        w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(low, seven_back), before);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  uint32_t high[4], low[4];
  _mm_storeu_si128((__m128i *)high, abef);
  _mm_storeu_si128((__m128i *)low, cdgh);
  state[0] = high[3], state[1] = high[2], state[4] = high[1], state[5] = high[0];
  state[2] = low[3], state[3] = low[2], state[6] = low[1], state[7] = low[0];
}

coda_sha256_compress coda_sha256_best(void) {
  return coda_cpu_has("sha_ni") ? compress_sha_ni : compress_generic; /* whose CPUs have SSE 4.1 too */
}
#elif defined(__aarch64__)
#include <arm_neon.h>

/* Arm ARM (DDI 0487), C7.2, by name; in assembly, as compilers have intrinsics only for the CPU that they build for. */
#define SHA_INSTRUCTION(text, result, ...) __asm__(".arch_extension sha2\n\t" text : "+w"(result) : __VA_ARGS__)

static void compress_sha2(uint32_t state[8], const uint8_t *data, size_t blocks) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; blocks; blocks--, data += BLOCK) {
    const uint32x4_t first_abcd = abcd, first_efgh = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; i++)
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    for (int i = 0; i < 16; i++) {
      const uint32x4_t wk = vaddq_u32(w[i % 4], vld1q_u32(K + 4 * i)), before = abcd;
      SHA_INSTRUCTION("sha256h %q0, %q1, %2.4s", abcd, "w"(efgh), "w"(wk));
      SHA_INSTRUCTION("sha256h2 %q0, %q1, %2.4s", efgh, "w"(before), "w"(wk));
      if (i < 12) {
        SHA_INSTRUCTION("sha256su0 %0.4s, %1.4s", w[i % 4], "w"(w[(i + 1) % 4]));
        SHA_INSTRUCTION("sha256su1 %0.4s, %1.4s, %2.4s", w[i % 4], "w"(w[(i + 2) % 4]), "w"(w[(i + 3) % 4]));
      }
    }
    abcd = vaddq_u32(abcd, first_abcd);
    efgh = vaddq_u32(efgh, first_efgh);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

coda_sha256_compress coda_sha256_best(void) { return coda_cpu_has("sha2") ? compress_sha2 : compress_generic; }
#else
coda_sha256_compress coda_sha256_best(void) { return compress_generic; }
#endif

void coda_sha256_by(coda_sha256_compress compress, const void *data, size_t size, uint8_t digest[CODA_SHA256_BYTES]) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const size_t whole = size / BLOCK, rest = size % BLOCK;
  compress(state, data, whole);
  uint8_t tail[2 * BLOCK] = {0};
  if (rest)
    memcpy(tail, (const uint8_t *)data + whole * BLOCK, rest);
  tail[rest] = 0x80;
  const size_t tail_blocks = rest + 9 > BLOCK ? 2 : 1;
  const uint64_t bits = (uint64_t)size * 8;
  store_be(tail + tail_blocks * BLOCK - 8, (uint32_t)(bits >> 32));
  store_be(tail + tail_blocks * BLOCK - 4, (uint32_t)bits);
  compress(state, tail, tail_blocks);
  for (int i = 0; i < 8; i++)
    store_be(digest + 4 * i, state[i]);
}

void coda_sha256(const void *data, size_t size, uint8_t digest[CODA_SHA256_BYTES]) {
  coda_sha256_by(coda_sha256_best(), data, size, digest);
}
