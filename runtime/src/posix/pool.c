/* A fork-join pool in which the caller waits for items, not for workers.
 *
 * A loop is cut into chunks, and each thread has a range of them in a 64-bit word (generation, next, end). A thread
 * takes its own in order, so that what it reads follows on what it read before, and when they are gone those of the
 * others, in order too. Taking is a compare-and-swap, so that a late worker can never touch a loop that is over, and a
 * worker that the system has not scheduled costs nothing: the others take its chunks. An odd generation is closed while
 * the caller writes the next loop.
 *
 * A loop is cut by its cost: into so many chunks that a late thread's can be taken by others, but none so small that it
 * costs more to hand over than to do. Workers spin between the loops of a run and for a while after it, and then sleep;
 * who waits for long gives others the core in between.
 */
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
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
  INDEX_MASK = (1 << INDEX_BITS) - 1,
  MAX_CHUNKS = INDEX_MASK - 1,
  CHUNKS_PER_THREAD = 4, /* enough to even out a late thread */
  SHARE_NS = 1000, /* the least work that a thread is called for; to call one that spins takes some 300 ns */
  CHUNK_NS = 5000, /* the least work of a chunk where a thread gets several; each costs some 70 ns more */
  PAUSES_PER_CLOCK = 32, /* spins between two looks at the clock */
  CALLER_SPIN_NS = 200000, /* after this the caller offers its core to whoever holds the last chunk */
  WORKER_SPIN_NS = 50000, /* after this an idle worker offers its core to whoever has work */
  RUN_SPINS = 8, /* how many times longer a worker spins while a run is under way */
  LINE = 64,
};

/* A thread: the caller's is the first. */
typedef struct {
  _Alignas(LINE) _Atomic uint64_t range; /* low half of the generation, next chunk, end of its chunks */
  _Alignas(LINE) pthread_t thread;
  coda_pool *pool;
  int index;
} lane;

struct coda_pool {
  _Alignas(LINE) _Atomic uint64_t generation;
  _Alignas(LINE) _Atomic uint64_t completed;
  _Atomic int32_t failure;
  _Alignas(LINE) _Atomic(coda_chunk) run; /* the loop; relaxed: the generation orders it */
  _Atomic(void *) context;
  _Atomic int64_t items, grain;
  _Atomic uint64_t grains, chunks;
  _Atomic int lanes_used;
  _Alignas(LINE) _Atomic int sleeping;
  _Atomic uint32_t wakes; /* what sleepers wait on: asks them to spin again */
  _Atomic bool running, stop; /* running: between coda_pool_begin and coda_pool_end */
  bool lent;
  int threads, started, expected; /* expected: what loops are cut for */
  int64_t spin_ns;
  size_t bytes; /* of this allocation */
  pid_t process; /* that has the workers: a forked child does not */
  lane lanes[];
};

/* The first of `total` that is in part `index` of `parts` as even ones as can be. */
static uint64_t part_begin(uint64_t index, uint64_t total, uint64_t parts) {
  return index * (total / parts) + index * (total % parts) / parts;
}

static uint64_t pack_range(uint64_t generation, uint64_t next, uint64_t end) {
  return generation << (2 * INDEX_BITS) | next << INDEX_BITS | end;
}

/* Takes the next chunk of `range` if it has one of this generation. */
static bool take(_Atomic uint64_t *range, uint64_t generation, uint64_t *index) {
  uint64_t old = atomic_load_explicit(range, memory_order_relaxed);
  for (;;) {
    const uint64_t next = old >> INDEX_BITS & INDEX_MASK, end = old & INDEX_MASK;
    if (old != pack_range(generation, next, end) || next >= end)
      return false;
    *index = next;
    if (atomic_compare_exchange_weak_explicit(range, &old, pack_range(generation, next + 1, end), memory_order_acq_rel,
                                              memory_order_relaxed))
      return true;
  }
}

static void drain(coda_pool *pool, int thread) {
  const uint64_t generation = atomic_load_explicit(&pool->generation, memory_order_acquire);
  const coda_chunk run = atomic_load_explicit(&pool->run, memory_order_relaxed);
  void *context = atomic_load_explicit(&pool->context, memory_order_relaxed);
  const int64_t items = atomic_load_explicit(&pool->items, memory_order_relaxed);
  const int64_t grain = atomic_load_explicit(&pool->grain, memory_order_relaxed);
  const uint64_t grains = atomic_load_explicit(&pool->grains, memory_order_relaxed);
  const uint64_t chunks = atomic_load_explicit(&pool->chunks, memory_order_relaxed);
  const int lanes = atomic_load_explicit(&pool->lanes_used, memory_order_relaxed);
  if (generation & 1)
    return;
  atomic_thread_fence(memory_order_acquire); /* had a field been of a later loop, no chunk could be taken below */
  for (int k = 0; k < lanes; k++) {
    const int owner = (thread + k) % lanes;
    uint64_t index;
    while (take(&pool->lanes[owner].range, generation, &index)) {
      const int64_t begin = (int64_t)part_begin(index, grains, chunks) * grain;
      const int64_t end = index + 1 == chunks ? items : (int64_t)part_begin(index + 1, grains, chunks) * grain;
      if (atomic_load_explicit(&pool->failure, memory_order_relaxed) == 0) {
        const int32_t code = run(context, begin, end, thread);
        if (code)
          atomic_store_explicit(&pool->failure, code, memory_order_relaxed);
      }
      atomic_fetch_add_explicit(&pool->completed, 1, memory_order_release);
    }
  }
}

/* Whether a worker has nothing more to expect. */
static bool over(const coda_pool *pool) { return pool->lent ? !atomic_load(&pool->running) : atomic_load(&pool->stop); }

static bool idle(const coda_pool *pool, uint64_t seen) { return atomic_load(&pool->generation) == seen && !over(pool); }

/* A futex and no mutex, which a worker could hold while the system does not let it run. */
static void sleep_until_called(coda_pool *pool, uint64_t seen) {
  const uint32_t wakes = atomic_load(&pool->wakes);
  atomic_fetch_add(&pool->sleeping, 1);
  if (idle(pool, seen))
    syscall(SYS_futex, &pool->wakes, FUTEX_WAIT_PRIVATE, wakes, NULL, NULL, 0);
  atomic_fetch_sub(&pool->sleeping, 1);
}

static void wake(coda_pool *pool) {
  if (atomic_load(&pool->sleeping) == 0)
    return;
  atomic_fetch_add(&pool->wakes, 1);
  syscall(SYS_futex, &pool->wakes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Whether a worker that has been idle for so long should sleep; one that should not, but has been for long, yields. */
static bool out_of_patience(const coda_pool *pool, int64_t idle_ns) {
  const bool running = atomic_load_explicit(&pool->running, memory_order_relaxed);
  if (idle_ns >= pool->spin_ns * (running ? RUN_SPINS : 1))
    return true;
  if (idle_ns >= WORKER_SPIN_NS)
    sched_yield();
  return false;
}

static void work(coda_pool *pool, int index) {
  uint64_t seen = 0;
  int64_t idle_since = coda_now_ns();
  for (unsigned spins = 1; !over(pool); spins++) {
    const uint64_t current = atomic_load_explicit(&pool->generation, memory_order_acquire);
    if (current != seen && !(current & 1)) {
      seen = current;
      drain(pool, index);
      idle_since = coda_now_ns();
      spins = 0;
    } else if (spins % PAUSES_PER_CLOCK) {
      PAUSE();
    } else if (out_of_patience(pool, coda_now_ns() - idle_since)) {
      sleep_until_called(pool, seen);
      idle_since = coda_now_ns();
    }
  }
}

static void *worker_main(void *argument) {
  const lane *self = argument;
  work(self->pool, self->index);
  return NULL;
}

coda_pool *coda_pool_create(int threads, int64_t spin_us, bool lent, const coda_allocator *allocator) {
  const size_t bytes = sizeof(coda_pool) + (size_t)threads * sizeof(lane);
  coda_pool *pool = allocator->allocate(allocator->context, bytes, LINE);
  if (!pool)
    return NULL;
  memset(pool, 0, bytes);
  pool->bytes = bytes;
  pool->process = getpid();
  pool->threads = pool->expected = threads;
  pool->lent = lent;
  pool->spin_ns = spin_us * 1000;
  for (int i = 1; i < threads && !lent; i++) {
    pool->lanes[i].pool = pool;
    pool->lanes[i].index = i;
    if (pthread_create(&pool->lanes[i].thread, NULL, worker_main, &pool->lanes[i]) != 0) {
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
    atomic_store(&pool->stop, true);
    wake(pool);
    for (int i = 1; i <= pool->started; i++)
      pthread_join(pool->lanes[i].thread, NULL);
  }
  allocator->release(allocator->context, pool, pool->bytes);
}

void coda_pool_begin(coda_pool *pool) {
  if (pool->threads == 1)
    return;
  atomic_store_explicit(&pool->running, true, memory_order_release);
  wake(pool);
}

void coda_pool_end(coda_pool *pool) {
  if (!pool->lent) {
    atomic_store_explicit(&pool->running, false, memory_order_relaxed);
    return;
  }
  atomic_store(&pool->running, false);
  wake(pool);
}

void coda_pool_expect(coda_pool *pool, int threads) {
  pool->expected = threads < pool->threads ? threads : pool->threads;
}

bool coda_pool_help(coda_pool *pool, int index) {
  if (index >= pool->threads || over(pool))
    return false;
  work(pool, index);
  return true;
}

/* How many chunks a loop of so many grains is worth. */
static uint64_t count_chunks(const coda_pool *pool, uint64_t grains, int64_t cost_ns) {
  const uint64_t cost = cost_ns > 0 ? (uint64_t)cost_ns : 0, worth = cost / SHARE_NS;
  const uint64_t expected = (uint64_t)pool->expected, threads = worth < expected ? worth : expected;
  uint64_t each = cost / CHUNK_NS / expected;
  each = each < 1 ? 1 : each > CHUNKS_PER_THREAD ? CHUNKS_PER_THREAD : each;
  const uint64_t chunks = threads * each < MAX_CHUNKS ? threads * each : MAX_CHUNKS;
  return grains < chunks ? grains : chunks;
}

static int32_t fork_join(coda_pool *pool, int64_t items, int64_t grain, uint64_t grains, uint64_t chunks,
                         coda_chunk run, void *context) {
  const uint64_t before = atomic_load_explicit(&pool->generation, memory_order_relaxed);
  const uint64_t lanes = chunks < (uint64_t)pool->expected ? chunks : (uint64_t)pool->expected;
  atomic_store_explicit(&pool->generation, before + 1, memory_order_relaxed);
  atomic_thread_fence(memory_order_release);
  atomic_store_explicit(&pool->run, run, memory_order_relaxed);
  atomic_store_explicit(&pool->context, context, memory_order_relaxed);
  atomic_store_explicit(&pool->items, items, memory_order_relaxed);
  atomic_store_explicit(&pool->grain, grain, memory_order_relaxed);
  atomic_store_explicit(&pool->grains, grains, memory_order_relaxed);
  atomic_store_explicit(&pool->chunks, chunks, memory_order_relaxed);
  atomic_store_explicit(&pool->lanes_used, (int)lanes, memory_order_relaxed);
  atomic_store_explicit(&pool->completed, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->failure, 0, memory_order_relaxed);
  for (uint64_t i = 0; i < lanes; i++) {
    const uint64_t range = pack_range(before + 2, part_begin(i, chunks, lanes), part_begin(i + 1, chunks, lanes));
    atomic_store_explicit(&pool->lanes[i].range, range, memory_order_relaxed);
  }
  atomic_store(&pool->generation, before + 2);
  wake(pool);
  drain(pool, 0);
  int64_t waiting_since = 0;
  for (unsigned spins = 1; atomic_load_explicit(&pool->completed, memory_order_acquire) != chunks; spins++) {
    PAUSE();
    if (spins % PAUSES_PER_CLOCK)
      continue;
    const int64_t now = coda_now_ns();
    if (!waiting_since)
      waiting_since = now;
    else if (now - waiting_since >= CALLER_SPIN_NS)
      sched_yield();
  }
  return atomic_load_explicit(&pool->failure, memory_order_relaxed);
}

int32_t coda_pool_for(coda_pool *pool, int64_t items, int64_t grain, int64_t cost_ns, coda_chunk run, void *context) {
  if (pool->expected < 2)
    return run(context, 0, items, 0);
  const uint64_t grains = (uint64_t)(items / grain + (items % grain != 0));
  const uint64_t chunks = count_chunks(pool, grains, cost_ns);
  if (chunks < 2)
    return run(context, 0, items, 0);
  return fork_join(pool, items, grain, grains, chunks, run, context);
}
