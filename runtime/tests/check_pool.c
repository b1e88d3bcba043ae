/* Checks of the pool. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "clock.h"
#include "platform.h"
#include "pool.h"

enum { ITEMS = 1000, THREADS = 4, MUCH = 1 << 30 /* nanoseconds: a loop that all threads share */ };

typedef struct {
  _Atomic int done[ITEMS]; /* how often */
  _Atomic int calls, by_workers;
  _Atomic int longest, shortest; /* chunks, the last one left out */
  int64_t items, grain;
} record;

static int32_t note(void *context, int64_t begin, int64_t end, int thread) {
  record *r = context;
  for (int64_t i = begin; i < end; i++)
    r->done[i]++;
  r->calls++;
  r->by_workers += thread > 0;
  CHECK(begin % r->grain == 0 && (end == r->items || end % r->grain == 0));
  const int size = (int)(end - begin);
  if (size > r->longest)
    r->longest = size;
  if (size < r->shortest && end != r->items)
    r->shortest = size;
  return 0;
}

static void loop(coda_pool *pool, record *r, int64_t items, int64_t grain, int64_t cost_ns) {
  memset(r, 0, sizeof *r);
  r->shortest = ITEMS;
  r->items = items;
  r->grain = grain;
  CHECK(coda_pool_for(pool, items, grain, cost_ns, note, r) == 0);
  for (int64_t i = 0; i < items; i++)
    CHECK(r->done[i] == 1);
}

static void check_chunks(void) {
  static record r;
  coda_pool *pool = coda_pool_create(THREADS, 100, false, coda_default_allocator);
  coda_pool_begin(pool);
  for (int64_t items = 1; items <= ITEMS; items += items < 40 ? 1 : 173)
    for (int64_t grain = 1; grain <= 64; grain *= 4) {
      loop(pool, &r, items, grain, MUCH);
      CHECK(r.calls <= 4 * THREADS && r.longest <= r.shortest + grain);
    }
  loop(pool, &r, 36, 1, MUCH);
  CHECK(r.calls == 16 && r.longest == 3);
  loop(pool, &r, ITEMS, 1, 1500);
  CHECK(r.calls == 1 && r.by_workers == 0);
  loop(pool, &r, ITEMS, 1, 2500);
  CHECK(r.calls == 2);
  loop(pool, &r, ITEMS, 1, THREADS * 4000);
  CHECK(r.calls == THREADS);
  loop(pool, &r, ITEMS, 1, -1);
  CHECK(r.calls == 1);
  coda_pool_end(pool);
  coda_pool_free(pool, coda_default_allocator);
  pool = coda_pool_create(1, 100, false, coda_default_allocator);
  loop(pool, &r, ITEMS, 1, MUCH);
  CHECK(r.calls == 1);
  coda_pool_free(pool, coda_default_allocator);
}

typedef struct {
  _Atomic int64_t items, sum;
} total;

static int32_t add(void *context, int64_t begin, int64_t end, int thread) {
  total *t = context;
  (void)thread;
  for (int64_t i = begin; i < end; i++) {
    t->items++;
    t->sum += i;
  }
  return 0;
}

/* Loops so short that workers come late to most of them. */
static void check_late_workers(void) {
  coda_pool *pool = coda_pool_create(THREADS, 1000, false, coda_default_allocator);
  coda_pool_begin(pool);
  for (int64_t k = 0; k < 1000; k++) {
    const int64_t items = 1 + k * 7 % 50;
    total t = {0, 0};
    CHECK(coda_pool_for(pool, items, 1 + k % 3, MUCH, add, &t) == 0);
    CHECK(t.items == items && t.sum == items * (items - 1) / 2);
  }
  coda_pool_end(pool);
  coda_pool_free(pool, coda_default_allocator);
}

typedef struct {
  coda_pool *pool;
  int index;
} helper;

static void *help(void *argument) {
  const helper *h = argument;
  coda_pool_help(h->pool, h->index);
  return NULL;
}

/* Workers that come and go with each run. */
static void check_lent_threads(void) {
  coda_pool *pool = coda_pool_create(THREADS, 100, true, coda_default_allocator);
  CHECK(!coda_pool_help(pool, 1));
  for (int round = 0; round < 50; round++) {
    helper helpers[THREADS];
    pthread_t lent[THREADS];
    coda_pool_expect(pool, 1 + round % THREADS);
    coda_pool_begin(pool);
    for (int i = 1; i < THREADS; i++) {
      helpers[i] = (helper){pool, i};
      CHECK(pthread_create(&lent[i], NULL, help, &helpers[i]) == 0);
    }
    for (int64_t items = 1; items <= 40; items++) {
      total t = {0, 0};
      CHECK(coda_pool_for(pool, items, 1 + items % 3, MUCH, add, &t) == 0);
      CHECK(t.items == items && t.sum == items * (items - 1) / 2);
    }
    coda_pool_end(pool);
    for (int i = 1; i < THREADS; i++)
      CHECK(pthread_join(lent[i], NULL) == 0);
    CHECK(!coda_pool_help(pool, 1));
  }
  coda_pool_free(pool, coda_default_allocator);
}

/* --- workers that do not run ----------------------------------------------------------------------------------------
 */

/* The thread sanitizer puts signals off, so that no worker could be held. */
#if !defined(__SANITIZE_THREAD__)
static pthread_t threads[THREADS];
static _Atomic int present, held;
static _Atomic bool released;

/* Holds the thread that gets the signal. */
static void hold(int signal) {
  (void)signal;
  held++;
  while (!released)
    sched_yield();
  held--;
}

/* Ends when every thread has taken a chunk. */
static int32_t meet(void *context, int64_t begin, int64_t end, int thread) {
  _Atomic bool *here = context;
  (void)begin, (void)end;
  threads[thread] = pthread_self();
  present += !here[thread];
  here[thread] = true;
  while (present < THREADS)
    sched_yield();
  return 0;
}

static void gather(coda_pool *pool) {
  _Atomic bool here[THREADS] = {false};
  present = 0;
  CHECK(coda_pool_for(pool, ITEMS, 1, MUCH, meet, here) == 0);
  CHECK(present == THREADS);
}

/* Loops end although all workers are held, awake or asleep; afterwards the workers are there again. */
static void check_held(int64_t spin_us) {
  static record r;
  coda_pool *pool = coda_pool_create(THREADS, spin_us, false, coda_default_allocator);
  const int64_t pause = coda_now_ns() + 20000000;
  gather(pool);
  while (spin_us == 0 && coda_now_ns() < pause)
    sched_yield();
  released = false;
  for (int i = 1; i < THREADS; i++)
    CHECK(pthread_kill(threads[i], SIGUSR1) == 0);
  while (held < THREADS - 1)
    sched_yield();
  for (int64_t items = 1; items <= 200; items++) {
    loop(pool, &r, items, 1, MUCH);
    CHECK(r.by_workers == 0);
  }
  released = true;
  gather(pool);
  coda_pool_free(pool, coda_default_allocator);
}
#endif

void check_pool(void) {
  check_chunks();
  check_late_workers();
  check_lent_threads();
#if !defined(__SANITIZE_THREAD__)
  const struct sigaction action = {.sa_handler = hold};
  struct sigaction before;
  sigaction(SIGUSR1, &action, &before);
  check_held(1000000);
  check_held(0);
  sigaction(SIGUSR1, &before, NULL);
#endif
}
