/* A platform without an operating system: no threads, no clock, no memory but the caller's. */
#include "cpu.h"
#include "platform.h"
#include "pool.h"

const coda_allocator *const coda_default_allocator = NULL;

int64_t coda_clock_ns(void) { return 0; }

uint64_t coda_entropy(void) { return 1; }

/* Whoever links kernels into a program knows its CPU. */
bool coda_cpu_has(const char *name) {
  (void)name;
  return true;
}

size_t coda_cpu_features(const char **names, size_t capacity) {
  (void)names, (void)capacity;
  return 0;
}

int32_t coda_cpu_cores(void) { return 1; }

/* The calling thread. */
struct coda_pool {
  char unused;
};

static coda_pool caller;

coda_pool *coda_pool_create(int threads, int64_t spin_us, bool lent, const coda_allocator *allocator) {
  (void)spin_us, (void)lent, (void)allocator;
  return threads == 1 ? &caller : NULL;
}

void coda_pool_free(coda_pool *pool, const coda_allocator *allocator) { (void)pool, (void)allocator; }

void coda_pool_begin(coda_pool *pool) { (void)pool; }

void coda_pool_end(coda_pool *pool) { (void)pool; }

void coda_pool_expect(coda_pool *pool, int threads) { (void)pool, (void)threads; }

bool coda_pool_help(coda_pool *pool, int index) {
  (void)pool, (void)index;
  return false;
}

int32_t coda_pool_for(coda_pool *pool, int64_t items, int64_t grain, int64_t cost_ns, coda_chunk run, void *context) {
  (void)pool, (void)grain, (void)cost_ns;
  return run(context, 0, items, 0);
}
