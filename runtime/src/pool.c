/* A fork-join pool in which the caller waits for items, not for workers.
 *
 * One 64-bit word holds (generation, next chunk). A thread takes a chunk by compare-and-swap on it, so a late worker
 * can never touch a loop that is over, and a worker that the system has not scheduled costs nothing: the others take
 * its chunks. An odd generation is closed while the caller writes the next loop. Workers spin for a while after a loop,
 * since the next one usually follows within microseconds, and then sleep.
 */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) || defined(__arm__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

enum {
  INDEX_BITS = 16,
  MAX_CHUNKS = (1 << INDEX_BITS) - 2,
  CHUNKS_PER_THREAD = 4, /* enough to even out a late thread, few enough to keep each chunk's weights in cache */
  PAUSES_PER_CLOCK = 32, /* spins between two looks at the clock */
  PAUSES_TO_YIELD = 4096, /* after this the caller offers its core to whoever holds the last chunk */
  LINE = 64,
};

typedef struct {
  pthread_t thread;
  coda_pool *pool;
  int index;
} worker;

struct coda_pool {
  _Alignas(LINE) _Atomic uint64_t state; /* generation << INDEX_BITS | next chunk */
  _Alignas(LINE) _Atomic uint64_t completed;
  _Atomic int32_t failure;
  _Alignas(LINE) _Atomic(coda_chunk) run; /* the loop; relaxed: the state orders it */
  _Atomic(void *) context;
  _Atomic int64_t items, chunk;
  _Atomic uint64_t chunks;
  _Alignas(LINE) _Atomic int sleeping;
  _Atomic bool stop;
  int threads, started;
  int64_t spin_ns;
  size_t bytes; /* of this allocation */
  pid_t process; /* that has the workers: a forked child does not */
  pthread_mutex_t mutex;
  pthread_cond_t condition;
  uint64_t wakes; /* under the mutex: asks sleepers to spin again */
  worker workers[];
};

static uint64_t generation(uint64_t state) { return state >> INDEX_BITS; }

static void drain(coda_pool *pool, int thread) {
  for (;;) {
    uint64_t state = atomic_load_explicit(&pool->state, memory_order_acquire);
    const uint64_t index = state & (((uint64_t)1 << INDEX_BITS) - 1);
    const coda_chunk run = atomic_load_explicit(&pool->run, memory_order_relaxed);
    void *context = atomic_load_explicit(&pool->context, memory_order_relaxed);
    const int64_t items = atomic_load_explicit(&pool->items, memory_order_relaxed);
    const int64_t chunk = atomic_load_explicit(&pool->chunk, memory_order_relaxed);
    const uint64_t chunks = atomic_load_explicit(&pool->chunks, memory_order_relaxed);
    if (generation(state) & 1 || index >= chunks)
      return;
    atomic_thread_fence(memory_order_acquire); /* had a field been of a later loop, the swap below would fail */
    if (!atomic_compare_exchange_weak_explicit(&pool->state, &state, state + 1, memory_order_acq_rel,
                                               memory_order_relaxed))
      continue;
    const int64_t begin = (int64_t)index * chunk;
    const int64_t end = items - begin < chunk ? items : begin + chunk;
    if (atomic_load_explicit(&pool->failure, memory_order_relaxed) == 0) {
      const int32_t code = run(context, begin, end, thread);
      if (code)
        atomic_store_explicit(&pool->failure, code, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&pool->completed, 1, memory_order_release);
  }
}

static bool idle(const coda_pool *pool, uint64_t seen) {
  return generation(atomic_load(&pool->state)) == seen && !atomic_load_explicit(&pool->stop, memory_order_relaxed);
}

static void sleep_until_called(coda_pool *pool, uint64_t seen) {
  pthread_mutex_lock(&pool->mutex);
  const uint64_t wakes = pool->wakes;
  atomic_fetch_add(&pool->sleeping, 1);
  while (idle(pool, seen) && pool->wakes == wakes)
    pthread_cond_wait(&pool->condition, &pool->mutex);
  atomic_fetch_sub(&pool->sleeping, 1);
  pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
  const worker *self = argument;
  coda_pool *pool = self->pool;
  uint64_t seen = 0;
  int64_t deadline = coda_now_ns() + pool->spin_ns;
  for (unsigned spins = 1; !atomic_load_explicit(&pool->stop, memory_order_relaxed); spins++) {
    const uint64_t current = generation(atomic_load_explicit(&pool->state, memory_order_acquire));
    if (current != seen && !(current & 1)) {
      seen = current;
      drain(pool, self->index);
      deadline = coda_now_ns() + pool->spin_ns;
    } else if (spins % PAUSES_PER_CLOCK == 0 && coda_now_ns() >= deadline) {
      sleep_until_called(pool, seen);
      deadline = coda_now_ns() + pool->spin_ns;
    } else {
      PAUSE();
    }
  }
  return NULL;
}

coda_pool *coda_pool_create(int threads, int64_t spin_us, const coda_allocator *allocator) {
  const size_t bytes = sizeof(coda_pool) + (size_t)(threads - 1) * sizeof(worker);
  coda_pool *pool = allocator->allocate(allocator->context, bytes, LINE);
  if (!pool)
    return NULL;
  memset(pool, 0, bytes);
  pool->bytes = bytes;
  pool->process = getpid();
  pool->threads = threads;
  pool->spin_ns = spin_us * 1000;
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->condition, NULL);
  for (int i = 0; i < threads - 1; i++) {
    pool->workers[i].pool = pool;
    pool->workers[i].index = i + 1;
    if (pthread_create(&pool->workers[i].thread, NULL, worker_main, &pool->workers[i]) != 0) {
      coda_pool_free(pool, allocator);
      return NULL;
    }
    pool->started++;
  }
  return pool;
}

void coda_pool_free(coda_pool *pool, const coda_allocator *allocator) {
  if (!pool)
    return;
  if (pool->process == getpid()) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->condition);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->started; i++)
      pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->condition);
  }
  allocator->release(allocator->context, pool, pool->bytes);
}

void coda_pool_wake(coda_pool *pool) {
  if (pool->started == 0 || atomic_load(&pool->sleeping) == 0)
    return;
  /* In a forked child the mutex may be held for ever by a worker that the child does not have. */
  if (pool->process != getpid())
    return;
  pthread_mutex_lock(&pool->mutex);
  pool->wakes++;
  pthread_cond_broadcast(&pool->condition);
  pthread_mutex_unlock(&pool->mutex);
}

static int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t chunk_size(const coda_pool *pool, int64_t items, int64_t grain) {
  const int64_t pieces = (int64_t)pool->threads * CHUNKS_PER_THREAD;
  const int64_t least = divide_up(items, pieces < MAX_CHUNKS ? pieces : MAX_CHUNKS);
  const int64_t grains = divide_up(least, grain);
  return grains >= divide_up(items, grain) ? items : grains * grain;
}

int32_t coda_pool_for(coda_pool *pool, int64_t items, int64_t grain, coda_chunk run, void *context) {
  const int64_t chunk = pool->started ? chunk_size(pool, items, grain) : items;
  if (chunk >= items)
    return run(context, 0, items, 0);
  const uint64_t chunks = (uint64_t)divide_up(items, chunk);
  const uint64_t before = generation(atomic_load_explicit(&pool->state, memory_order_relaxed));
  atomic_store_explicit(&pool->state, (before + 1) << INDEX_BITS, memory_order_relaxed);
  atomic_thread_fence(memory_order_release);
  atomic_store_explicit(&pool->run, run, memory_order_relaxed);
  atomic_store_explicit(&pool->context, context, memory_order_relaxed);
  atomic_store_explicit(&pool->items, items, memory_order_relaxed);
  atomic_store_explicit(&pool->chunk, chunk, memory_order_relaxed);
  atomic_store_explicit(&pool->chunks, chunks, memory_order_relaxed);
  atomic_store_explicit(&pool->completed, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->failure, 0, memory_order_relaxed);
  atomic_store(&pool->state, (before + 2) << INDEX_BITS);
  coda_pool_wake(pool);
  drain(pool, 0);
  for (unsigned spins = 1; atomic_load_explicit(&pool->completed, memory_order_acquire) != chunks; spins++) {
    if (spins % PAUSES_TO_YIELD == 0)
      sched_yield();
    else
      PAUSE();
  }
  return atomic_load_explicit(&pool->failure, memory_order_relaxed);
}
