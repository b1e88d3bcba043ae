/* Ed25519 after RFC 8032, section 5.1, as far as verifying needs it. Numbers are of eight words of 32 bits; field
 * elements are below 2^256 and reduced to below p = 2^255 - 19 only where they are compared or written. */
#include "ed25519.h"

#include <string.h>

#include "bytes.h"
#include "sha512.h"

enum { WORDS = 8, BYTES = 32 };

typedef struct {
  uint32_t w[WORDS]; /* the lowest first */
} number;

static const number D = {{0x135978a3, 0x75eb4dca, 0x4141d8ab, 0x00700a4d, 0x7779e898, 0x8cc74079, 0x2b6ffe73,
                          0x52036cee}}; /* -121665 / 121666 */
static const number ROOT = {
    {0x4a0ea0b0, 0xc4ee1b27, 0xad2fe478, 0x2f431806, 0x3dfbd7a7, 0x2b4d0099, 0x4fc1df0b, 0x2b832480}}; /* of -1 */
static const number ORDER = {{0x5cf5d3ed, 0x5812631a, 0xa2f79cd6, 0x14def9de, 0x00000000, 0x00000000, 0x00000000,
                              0x10000000}}; /* of the base point */
static const number ONE = {{1}}, ZERO = {{0}};

/* --- numbers ------------------------------------------------------------------------------------------------------ */

static number load(const uint8_t *bytes) {
  number n;
  for (int i = 0; i < WORDS; i++)
    n.w[i] = coda_u32(bytes + 4 * i);
  return n;
}

/* a + b; returns what is carried out of it. */
static uint32_t add_words(number *sum, const number *a, const number *b) {
  uint64_t carry = 0;
  for (int i = 0; i < WORDS; i++) {
    carry += (uint64_t)a->w[i] + b->w[i];
    sum->w[i] = (uint32_t)carry;
    carry >>= 32;
  }
  return (uint32_t)carry;
}

/* a - b; returns 1 if that is negative. */
static uint32_t subtract_words(number *difference, const number *a, const number *b) {
  uint64_t borrow = 0;
  for (int i = 0; i < WORDS; i++) {
    const uint64_t v = (uint64_t)a->w[i] - b->w[i] - borrow;
    difference->w[i] = (uint32_t)v;
    borrow = v >> 63;
  }
  return (uint32_t)borrow;
}

static bool below(const number *a, const number *b) {
  number ignored;
  return subtract_words(&ignored, a, b);
}

/* --- the field, modulo p ------------------------------------------------------------------------------------------ */

/* a + 38 * excess, where 2^256 is 38. */
static number fold(number a, uint64_t excess) {
  while (excess) {
    const number more = {{(uint32_t)(excess * 38), (uint32_t)(excess * 38 >> 32)}};
    excess = add_words(&a, &a, &more);
  }
  return a;
}

static number add(number a, number b) {
  const uint32_t carry = add_words(&a, &a, &b);
  return fold(a, carry);
}

static number subtract(number a, number b) {
  const number more = {{38}};
  uint32_t borrow = subtract_words(&a, &a, &b);
  while (borrow)
    borrow = subtract_words(&a, &a, &more);
  return a;
}

static number multiply(number a, number b) {
  uint32_t product[2 * WORDS] = {0};
  for (int i = 0; i < WORDS; i++) {
    uint64_t carry = 0;
    for (int k = 0; k < WORDS; k++) {
      carry += product[i + k] + (uint64_t)a.w[i] * b.w[k];
      product[i + k] = (uint32_t)carry;
      carry >>= 32;
    }
    product[i + WORDS] = (uint32_t)carry;
  }
  number low;
  uint64_t carry = 0;
  for (int i = 0; i < WORDS; i++) {
    carry += product[i] + (uint64_t)product[i + WORDS] * 38;
    low.w[i] = (uint32_t)carry;
    carry >>= 32;
  }
  return fold(low, carry);
}

/* Below p. */
static number reduce(number a) {
  const number p = {{0xffffffed, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x7fffffff}};
  while (!below(&a, &p))
    subtract_words(&a, &a, &p);
  return a;
}

static bool equal(number a, number b) {
  a = reduce(a), b = reduce(b);
  return memcmp(&a, &b, sizeof a) == 0;
}

/* a to the power whose bits are `ones` ones and then the `tail_bits` low bits of `tail`. */
static number raise_to(number a, int ones, int tail_bits, uint32_t tail) {
  number r = ONE;
  for (int i = 0; i < ones; i++)
    r = multiply(multiply(r, r), a);
  for (int i = tail_bits - 1; i >= 0; i--) {
    r = multiply(r, r);
    if (tail >> i & 1)
      r = multiply(r, a);
  }
  return r;
}

static number invert(number a) { return raise_to(a, 250, 5, 0x0b); } /* p - 2 = 2^255 - 21 */

/* --- the curve ---------------------------------------------------------------------------------------------------- */

/* (x, y) as x = X/Z, y = Y/Z, xy = T/Z. */
typedef struct {
  number x, y, z, t;
} point;

/* The addition of section 5.1.4, which holds for all points, equal ones too. */
static point add_points(const point *p, const point *q) {
  const number a = multiply(subtract(p->y, p->x), subtract(q->y, q->x));
  const number b = multiply(add(p->y, p->x), add(q->y, q->x));
  const number c = multiply(multiply(p->t, add(q->t, q->t)), D);
  const number d = multiply(p->z, add(q->z, q->z));
  const number e = subtract(b, a), f = subtract(d, c), g = add(d, c), h = add(b, a);
  return (point){multiply(e, f), multiply(g, h), multiply(f, g), multiply(e, h)};
}

/* Section 5.1.3; false if the bytes are no point. */
static bool decode(const uint8_t *bytes, point *p) {
  number y = load(bytes);
  const uint32_t sign = y.w[WORDS - 1] >> 31;
  y.w[WORDS - 1] &= 0x7fffffff;
  const number canonical = reduce(y);
  if (memcmp(&canonical, &y, sizeof y) != 0)
    return false;
  const number yy = multiply(y, y), u = subtract(yy, ONE), v = add(multiply(D, yy), ONE);
  const number v3 = multiply(multiply(v, v), v), v7 = multiply(multiply(v3, v3), v);
  number x = multiply(multiply(u, v3), raise_to(multiply(u, v7), 250, 2, 1)); /* (p - 5) / 8 = 2^252 - 3 */
  const number vxx = multiply(v, multiply(x, x));
  if (equal(vxx, subtract(ZERO, u)))
    x = multiply(x, ROOT);
  else if (!equal(vxx, u))
    return false;
  x = reduce(x);
  if (sign && equal(x, ZERO))
    return false;
  if ((x.w[0] & 1) != sign)
    x = subtract(ZERO, x);
  *p = (point){x, y, ONE, multiply(x, y)};
  return true;
}

static void encode(const point *p, uint8_t *bytes) {
  const number inverse = invert(p->z), x = reduce(multiply(p->x, inverse));
  number y = reduce(multiply(p->y, inverse));
  y.w[WORDS - 1] |= x.w[0] << 31;
  for (int i = 0; i < BYTES; i++)
    bytes[i] = (uint8_t)(y.w[i / 4] >> 8 * (i % 4));
}

static uint32_t bit(const number *n, int i) { return n->w[i / 32] >> i % 32 & 1; }

/* a*p + b*q, the bits of both at once. */
static point combine(const number *a, const point *p, const number *b, const point *q) {
  const point both = add_points(p, q);
  point r = {ZERO, ONE, ONE, ZERO};
  for (int i = 255; i >= 0; i--) {
    r = add_points(&r, &r);
    const point *const terms[] = {NULL, p, q, &both};
    const point *const term = terms[bit(a, i) | bit(b, i) << 1];
    if (term)
      r = add_points(&r, term);
  }
  return r;
}

/* Whether 8p is the neutral point: as a key, such a point signs anything. */
static bool of_small_order(point p) {
  for (int i = 0; i < 3; i++)
    p = add_points(&p, &p);
  return equal(p.x, ZERO) && equal(p.y, p.z);
}

/* Of a number of 64 bytes, modulo the base point's order. */
static number reduce_digest(const uint8_t digest[CODA_SHA512_BYTES]) {
  number r = ZERO;
  for (int i = 8 * CODA_SHA512_BYTES - 1; i >= 0; i--) { /* stays below 2^253 */
    add_words(&r, &r, &r);
    r.w[0] |= digest[i / 8] >> i % 8 & 1;
    if (!below(&r, &ORDER))
      subtract_words(&r, &r, &ORDER);
  }
  return r;
}

bool coda_ed25519_verify(const uint8_t *key, const uint8_t *message, size_t size, const uint8_t *signature) {
  const point base = {
      {{0x8f25d51a, 0xc9562d60, 0x9525a7b2, 0x692cc760, 0xfdd6dc5c, 0xc0a4e231, 0xcd6e53fe, 0x216936d3}},
      {{0x66666658, 0x66666666, 0x66666666, 0x66666666, 0x66666666, 0x66666666, 0x66666666, 0x66666666}},
      ONE,
      {{0xa5b7dda3, 0x6dde8ab3, 0x775152f5, 0x20f09f80, 0x64abe37d, 0x66ea4e8e, 0xd78b7665, 0x67875f0f}}};
  const number s = load(signature + BYTES);
  uint8_t digest[CODA_SHA512_BYTES], encoded[BYTES];
  coda_sha512 hash;
  point a;
  if (!below(&s, &ORDER) || !decode(key, &a) || of_small_order(a))
    return false;
  coda_sha512_begin(&hash);
  coda_sha512_add(&hash, signature, BYTES);
  coda_sha512_add(&hash, key, BYTES);
  coda_sha512_add(&hash, message, size);
  coda_sha512_end(&hash, digest);
  const number k = reduce_digest(digest);
  a.x = subtract(ZERO, a.x), a.t = subtract(ZERO, a.t);
  const point r = combine(&s, &base, &k, &a); /* sB - kA, which must be R */
  encode(&r, encoded);
  return memcmp(encoded, signature, BYTES) == 0;
}
