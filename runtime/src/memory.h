/* Memory by the caller's allocator, or the platform's. */
#ifndef CODA_MEMORY_H
#define CODA_MEMORY_H

#include <stdbool.h>

#include "coda.h"

/* A block that can be replaced by a larger one; its contents are then lost. */
typedef struct {
  uint8_t *data;
  size_t bytes;
} coda_block;

/* Makes `block` at least `bytes` long. Returns 0, or -1 when there is no memory: the block is then empty. */
int coda_block_reserve(coda_block *block, size_t bytes, size_t alignment, const coda_allocator *allocator);

void coda_block_free(coda_block *block, const coda_allocator *allocator);

/* Cuts one block into tables, in two rounds over the same list of tables: in the first, `next` is NULL and it counts.
 */
typedef struct {
  uint8_t *next;
  size_t bytes;
  bool too_many; /* more bytes than memory can have */
} coda_cutter;

/* The next table, of `count` entries of `size` bytes. */
void *coda_cut(coda_cutter *cutter, uint64_t count, size_t size);

/* Between the rounds: reserves the block for what was counted, filled with zeros. Returns 0, or -1 when there is no
 * memory. */
int coda_cut_begin(coda_cutter *cutter, coda_block *block, const coda_allocator *allocator);

#endif
