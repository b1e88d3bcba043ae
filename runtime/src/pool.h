/* Worker threads that share out the items of one parallel loop at a time. */
#ifndef CODA_POOL_H
#define CODA_POOL_H

#include <stdbool.h>

#include "memory.h"

typedef struct coda_pool coda_pool;

/* Does items [begin, end) as thread `thread`; returns 0 or an error code. */
typedef int32_t (*coda_chunk)(void *context, int64_t begin, int64_t end, int thread);

/* A pool of `threads` threads, the caller among them as thread 0. A `lent` one starts none: its workers are those that
 * call coda_pool_help. NULL when threads or memory cannot be had. */
coda_pool *coda_pool_create(int threads, int64_t spin_us, bool lent, const coda_allocator *allocator);

void coda_pool_free(coda_pool *pool, const coda_allocator *allocator);

/* Between these two, loops follow each other closely: sleeping workers come up while the caller prepares the first one,
 * and spin on between them. */
void coda_pool_begin(coda_pool *pool);
void coda_pool_end(coda_pool *pool);

/* Of a lent pool: cuts the loops that follow for so many threads, at most its own. */
void coda_pool_expect(coda_pool *pool, int threads);

/* Of a lent pool: works as thread `index`, which no other thread is at that time, between coda_pool_begin and
 * coda_pool_end; returns at once, with false, at any other time. */
bool coda_pool_help(coda_pool *pool, int index);

/* Calls `run` on pieces that are multiples of `grain` and together cover [0, items). `cost_ns`: about how long one
 * thread would take for all; a loop that costs little is done by the caller alone. Returns 0, or the code of a piece
 * that failed. */
int32_t coda_pool_for(coda_pool *pool, int64_t items, int64_t grain, int64_t cost_ns, coda_chunk run, void *context);

#endif
