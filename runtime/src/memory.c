/* Blocks that grow, blocks cut into tables, and the allocator of programs that have none. */
#include "memory.h"

#include "text.h"

enum { TABLE_ALIGNMENT = 64 };

int coda_block_reserve(coda_block *block, size_t bytes, size_t alignment, const coda_allocator *allocator) {
  if (bytes <= block->bytes)
    return 0;
  coda_block_free(block, allocator);
  block->data = allocator->allocate(allocator->context, bytes, alignment);
  if (!block->data)
    return -1;
  block->bytes = bytes;
  return 0;
}

void coda_block_free(coda_block *block, const coda_allocator *allocator) {
  if (block->data)
    allocator->release(allocator->context, block->data, block->bytes);
  *block = (coda_block){NULL, 0};
}

void *coda_cut(coda_cutter *cutter, uint64_t count, size_t size) {
  const uint64_t bytes = (count * size + TABLE_ALIGNMENT - 1) / TABLE_ALIGNMENT * TABLE_ALIGNMENT;
  void *table = cutter->next;
  if (count > SIZE_MAX / 2 / size || bytes > SIZE_MAX / 2 - cutter->bytes)
    cutter->too_many = true;
  else if (cutter->next)
    cutter->next += bytes;
  else
    cutter->bytes += (size_t)bytes;
  return table;
}

int coda_cut_begin(coda_cutter *cutter, coda_block *block, const coda_allocator *allocator) {
  const size_t bytes = cutter->bytes + 1; /* tables of no entries have an address too */
  if (cutter->too_many || coda_block_reserve(block, bytes, TABLE_ALIGNMENT, allocator))
    return -1;
  memset(block->data, 0, block->bytes);
  cutter->next = block->data;
  return 0;
}

static void *region_allocate(void *context, size_t bytes, size_t alignment) {
  coda_region *region = context;
  const uintptr_t at = (uintptr_t)region->data + region->used;
  const size_t gap = (size_t)(0 - at) & (alignment - 1), left = region->bytes - region->used;
  if (gap > left || bytes > left - gap)
    return NULL;
  region->used += gap + bytes;
  return region->data + (region->used - bytes);
}

static void region_release(void *context, void *data, size_t bytes) {
  coda_region *region = context;
  if ((uint8_t *)data + bytes == region->data + region->used)
    region->used -= bytes;
}

coda_allocator coda_region_allocator(coda_region *region) {
  return (coda_allocator){region_allocate, region_release, region};
}
