/* A plan at one set of input shapes: every size a number, every arena buffer at its offset. Where data decides sizes,
 * it is laid out phase by phase, and holds each phase for the data that it saw last. */
#ifndef CODA_LAYOUT_H
#define CODA_LAYOUT_H

#include "plan.h"

/* The arena of the buffers that a phase begins to use. */
typedef struct {
  size_t bytes;
  const uint8_t *memory; /* what `addresses` point into; NULL before they are written */
} coda_arena;

typedef struct coda_layout {
  uint64_t used; /* when it was last used; 0: holds nothing */
  int64_t *dims; /* of all inputs, one after another: what it is found by */
  int64_t *values; /* the size table */
  int64_t *data; /* the reads' values that the phases are for */
  int64_t *tensor_bytes; /* of all inputs, then all outputs */
  int64_t *offsets; /* of arena buffers, by buffer */
  int64_t *ints; /* of all steps */
  uint64_t *addresses; /* of all steps' buffers; those of inputs and outputs are set by each run */
  coda_arena *arenas; /* by phase */
  uint32_t phases; /* how many are laid out */
  size_t scratch_bytes; /* the most of any phase */
} coda_layout;

enum { CODA_ALIGNMENT = 64 };

/* Bytes that the arrays of one layout take, and the assignment of such memory to them. */
size_t coda_layout_bytes(const coda_plan *plan);
void coda_layout_attach(coda_layout *layout, const coda_plan *plan, void *memory);

/* Checks inputs against the plan in all that does not depend on other inputs: given, type, rank. */
coda_code coda_layout_check_types(const coda_plan *plan, const coda_tensor *inputs, coda_error *error);

/* Whether the layout is for inputs of these dimensions. */
int coda_layout_matches(const coda_layout *layout, const coda_plan *plan, const coda_tensor *inputs);

/* Lays the first phase out for these inputs; `order` is working memory of 2 x buffers. On failure the layout holds
 * nothing. */
coda_code coda_layout_make(coda_layout *layout, const coda_plan *plan, const coda_tensor *inputs, uint32_t *order,
                           coda_error *error);

/* Reads the sizes that begin `phase`, 1 or later, and lays the phase out unless it is laid out for them already. On
 * failure the phases before stay as they are. */
coda_code coda_layout_continue(coda_layout *layout, const coda_plan *plan, uint32_t phase, const coda_tensor *inputs,
                               const coda_tensor *outputs, uint32_t *order, coda_error *error);

/* Writes the addresses of buffers in the arena of `phase`, and with the first phase of constants. */
void coda_layout_place(coda_layout *layout, const coda_plan *plan, uint32_t phase, const uint8_t *constants,
                       const uint8_t *repacked, const uint8_t *arena);

#endif
