/* Memory of a session: the caller's allocator, or the system's. */
#ifndef CODA_MEMORY_H
#define CODA_MEMORY_H

#include "coda.h"

/* The system's allocator: large blocks lie on huge pages where the system has them. */
extern const coda_allocator coda_system_allocator;

/* A block that can be replaced by a larger one; its contents are then lost. */
typedef struct {
  uint8_t *data;
  size_t bytes;
} coda_block;

/* Makes `block` at least `bytes` long. Returns 0, or -1 when there is no memory: the block is then empty. */
int coda_block_reserve(coda_block *block, size_t bytes, size_t alignment, const coda_allocator *allocator);

void coda_block_free(coda_block *block, const coda_allocator *allocator);

#endif
