/* What the core of the runtime asks of the system: memory, the time, a number. */
#include "platform.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "clock.h"

static const size_t HUGE_PAGE = (size_t)2 << 20;

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* Maps one huge page more than asked and gives back what lies outside the aligned part. */
static void *map_huge(size_t bytes) {
  const size_t size = round_up(bytes, HUGE_PAGE);
  if (size < bytes || size + HUGE_PAGE < size)
    return NULL;
  uint8_t *raw = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED)
    return NULL;
  const size_t before = round_up((uintptr_t)raw, HUGE_PAGE) - (uintptr_t)raw;
  if (before)
    munmap(raw, before);
  if (HUGE_PAGE - before)
    munmap(raw + before + size, HUGE_PAGE - before);
  madvise(raw + before, size, MADV_HUGEPAGE);
  return raw + before;
}

static void *system_allocate(void *context, size_t bytes, size_t alignment) {
  (void)context;
  void *data = NULL;
  if (bytes >= HUGE_PAGE / 2)
    return map_huge(bytes);
  return posix_memalign(&data, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes) == 0 ? data : NULL;
}

static void system_release(void *context, void *data, size_t bytes) {
  (void)context;
  if (bytes >= HUGE_PAGE / 2)
    munmap(data, round_up(bytes, HUGE_PAGE));
  else
    free(data);
}

static const coda_allocator SYSTEM = {system_allocate, system_release, NULL};

const coda_allocator *const coda_default_allocator = &SYSTEM;

int64_t coda_clock_ns(void) { return coda_now_ns(); }

uint64_t coda_entropy(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000007 + (uint64_t)t.tv_nsec;
}
