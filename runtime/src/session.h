/* A session, as its two parts see it: what it is made of, and how it runs. */
#ifndef CODA_SESSION_H
#define CODA_SESSION_H

#include <stdbool.h>

#include "layout.h"
#include "model.h"

enum { MAX_LAYOUTS = 16 }; /* shapes remembered; the least recently used makes room */

/* A step's operand that is an input or output: its address is set by each run. */
typedef struct {
  uint32_t slot; /* in a layout's addresses */
  uint32_t index;
  bool output;
} io_slot;

struct coda_session {
  coda_model *model;
  coda_allocator allocator;
  coda_pool *pool;
  int32_t threads, met; /* met: the most threads that a run was lent */
  bool lent;
  atomic_flag busy;
  atomic_bool cancelled;
  uint64_t clock;
  coda_layout layouts[MAX_LAYOUTS];
  coda_block layout_memory[MAX_LAYOUTS];
  uint32_t layout_count;
  const coda_layout *last; /* of the last run; NULL before the first */
  uint8_t *given; /* working memory of the caller's; NULL: arenas and scratch are blocks of the allocator */
  size_t given_bytes;
  coda_block scratch;
  coda_block *arenas, *owned; /* by phase; owned: outputs for which the caller gave no memory */
  uint64_t random; /* the number of the next run is drawn from it */
  coda_block tables; /* what the pointers below point into */
  coda_step_timer timer; /* NULL: steps are not timed */
  void *timer_context;
  io_slot *slots;
  uint32_t *order; /* for packing */
  uint64_t *frames; /* by thread: a step's buffers and scratch, then its ints, begin and end */
  uint32_t *run_ints; /* places in a layout's ints that are the run's number */
  uint32_t slot_count, run_count;
  size_t frame_words, frame_ints; /* words of one frame; of its first part */
  size_t scratch_stride;
  void *device; /* what the model's device keeps of the session */
};

/* Whether what a call is given can be looked at. */
coda_code coda_session_check(const coda_session *session, const coda_tensor *inputs, bool outputs, coda_error *error);

/* Takes the session for the calling thread. */
coda_code coda_session_enter(coda_session *session, coda_error *error);
void coda_session_leave(coda_session *session);

/* The layout for inputs of these shapes. */
coda_code coda_session_find_layout(coda_session *session, const coda_tensor *inputs, coda_layout **result,
                                   coda_error *error);

/* Fills in type and dimensions of the outputs that are known in `phase`. */
void coda_session_describe(const coda_session *session, const coda_layout *layout, uint32_t phase,
                           coda_tensor *outputs);

/* Bytes of scratch of one thread. */
size_t coda_session_scratch_stride(const coda_layout *layout);

/* Bytes up to the next multiple of CODA_ALIGNMENT. */
static inline size_t coda_padded(size_t bytes) {
  return (bytes + CODA_ALIGNMENT - 1) / CODA_ALIGNMENT * CODA_ALIGNMENT;
}

#endif
