/* Runs a model: finds or makes the layout of the inputs' shapes, places buffers, and calls the kernels in order. */
#include "checked.h"
#include "layout.h"
#include "model.h"
#include "platform.h"
#include "pool.h"
#include "text.h"

enum {
  MAX_LAYOUTS = 16, /* shapes remembered; the least recently used makes room */
  MAX_THREADS = 1024,
  DEFAULT_SPIN_US = 500,
  ERROR_INDEX = 1, /* the kernels' code for an index out of range */
  CANCELLED = -1, /* no kernel's code */
};

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
};

/* --- taking turns ------------------------------------------------------------------------------------------------- */

static coda_code check_arguments(const coda_session *session, const coda_tensor *inputs, bool outputs,
                                 coda_error *error) {
  if (!session || (!inputs && session->model->plan.input_count) || (!outputs && session->model->plan.output_count))
    return coda_fail(error, CODA_ERROR_ARGUMENT, "a run needs a session, its inputs and its outputs");
  return CODA_OK;
}

/* Takes the session for the calling thread. */
static coda_code enter(coda_session *session, coda_error *error) {
  if (atomic_flag_test_and_set_explicit(&session->busy, memory_order_acquire))
    return coda_fail(error, CODA_ERROR_ARGUMENT,
                     "the session is in use by another thread: give each thread its own, or take turns");
  return CODA_OK;
}

static void leave(coda_session *session) { atomic_flag_clear_explicit(&session->busy, memory_order_release); }

/* --- making ------------------------------------------------------------------------------------------------------- */

static size_t padded(size_t bytes) { return (bytes + CODA_ALIGNMENT - 1) / CODA_ALIGNMENT * CODA_ALIGNMENT; }

static void find_slots(coda_session *session) {
  const coda_plan *plan = &session->model->plan;
  uint32_t slot = 0, place = 0;
  for (uint32_t i = 0; i < plan->step_count; i++) {
    for (uint32_t k = 0; k < plan->steps[i].int_count; k++, place++)
      if (plan->exprs[plan->steps[i].ints[k]].op == EXPR_RUN)
        session->run_ints[session->run_count++] = place;
    for (uint32_t k = 0; k < plan->steps[i].buffer_count; k++, slot++) {
      const plan_buffer *b = &plan->buffers[plan->steps[i].buffers[k]];
      if (b->kind == BUFFER_INPUT || b->kind == BUFFER_OUTPUT)
        session->slots[session->slot_count++] = (io_slot){slot, (uint32_t)b->index, b->kind == BUFFER_OUTPUT};
    }
  }
}

static int make_tables(coda_session *session) {
  const coda_plan *plan = &session->model->plan;
  session->frame_ints = (size_t)plan->max_operands + 1;
  session->frame_words = padded((session->frame_ints + plan->max_ints + 2) * sizeof(uint64_t)) / sizeof(uint64_t);
  const size_t frames = (size_t)session->threads * session->frame_words * sizeof(uint64_t);
  const size_t slots = padded(plan->operand_count * sizeof(io_slot));
  const size_t order = padded(2 * (size_t)plan->buffer_count * sizeof(uint32_t));
  const size_t blocks = padded(plan->phase_count * sizeof(coda_block));
  const size_t run_ints = padded(plan->run_count * sizeof(uint32_t));
  if (coda_block_reserve(&session->tables, frames + slots + order + 2 * blocks + run_ints, CODA_ALIGNMENT,
                         &session->allocator))
    return -1;
  memset(session->tables.data, 0, session->tables.bytes);
  uint8_t *memory = session->tables.data;
  session->frames = (uint64_t *)memory;
  session->slots = (io_slot *)(memory += frames);
  session->order = (uint32_t *)(memory += slots);
  session->arenas = (coda_block *)(memory += order);
  session->owned = (coda_block *)(memory += blocks);
  session->run_ints = (uint32_t *)(memory + blocks);
  find_slots(session);
  return 0;
}

/* The options that the caller's version of the structure has; the rest are defaults. */
static coda_session_options read_options(const coda_session_options *given) {
  coda_session_options options = {.size = sizeof options, .spin_us = -1};
  if (given)
    memcpy(&options, given, given->size < sizeof options ? given->size : sizeof options);
  return options;
}

coda_code coda_session_create(coda_model *model, const coda_session_options *given, coda_session **result,
                              coda_error *error) {
  if (!model || !result)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_session_create needs a model and a place for the session");
  *result = NULL;
  const coda_session_options options = read_options(given);
  if (options.threads < 0 || options.threads > MAX_THREADS)
    return coda_fail(error, CODA_ERROR_ARGUMENT,
                     "a session cannot have %" PRId32 " threads, expected 1 to %d, or 0 for all cores", options.threads,
                     MAX_THREADS);
  const coda_allocator *allocator = options.allocator ? options.allocator : &model->allocator;
  coda_session *session = allocator->allocate(allocator->context, sizeof *session, CODA_ALIGNMENT);
  if (!session)
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a session");
  memset(session, 0, sizeof *session);
  session->model = model;
  coda_model_hold(model);
  session->allocator = *allocator;
  session->random = options.seed ? options.seed : coda_entropy() ^ (uint64_t)(uintptr_t)session << 20;
  session->threads = options.threads ? options.threads : coda_cpu_cores();
  if (session->threads > MAX_THREADS)
    session->threads = MAX_THREADS;
  atomic_flag_clear(&session->busy);
  atomic_init(&session->cancelled, false);
  const int64_t spin_us = options.spin_us < 0 ? DEFAULT_SPIN_US : options.spin_us;
  session->lent = options.lent != 0;
  session->pool = coda_pool_create(session->threads, spin_us, session->lent, &session->allocator);
  if (!session->pool || make_tables(session)) {
    const int32_t threads = session->threads;
    coda_session_free(session);
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for a session, or the system gives no %" PRId32 " threads",
                     threads);
  }
  *result = session;
  return CODA_OK;
}

/* Forgets working memory: that of the allocator is given back, the caller's is left alone. */
static void drop_working_memory(coda_session *session) {
  for (uint32_t i = 0; session->arenas && i < session->model->plan.phase_count; i++)
    if (session->given)
      session->arenas[i] = (coda_block){NULL, 0};
    else
      coda_block_free(&session->arenas[i], &session->allocator);
  if (session->given)
    session->scratch = (coda_block){NULL, 0};
  else
    coda_block_free(&session->scratch, &session->allocator);
}

void coda_session_free(coda_session *session) {
  if (!session)
    return;
  const coda_allocator allocator = session->allocator;
  coda_pool_free(session->pool, &allocator);
  drop_working_memory(session);
  for (uint32_t i = 0; i < session->layout_count; i++)
    coda_block_free(&session->layout_memory[i], &allocator);
  for (uint32_t i = 0; session->owned && i < session->model->plan.phase_count; i++)
    coda_block_free(&session->owned[i], &allocator);
  coda_block_free(&session->tables, &allocator);
  coda_model_free(session->model);
  allocator.release(allocator.context, session, sizeof *session);
}

int32_t coda_session_threads(const coda_session *session) { return session->threads; }

coda_code coda_session_seed(coda_session *session, uint64_t seed, coda_error *error) {
  coda_code code = enter(session, error);
  if (code)
    return code;
  session->random = seed;
  leave(session);
  return CODA_OK;
}

coda_code coda_session_set_timer(coda_session *session, coda_step_timer timer, void *context, coda_error *error) {
  coda_code code = enter(session, error);
  if (code)
    return code;
  session->timer = timer;
  session->timer_context = context;
  leave(session);
  return CODA_OK;
}

coda_code coda_session_cancel(coda_session *session, int32_t on) {
  if (!session)
    return CODA_ERROR_ARGUMENT;
  atomic_store(&session->cancelled, on != 0);
  return CODA_OK;
}

coda_code coda_session_set_memory(coda_session *session, void *memory, size_t bytes, coda_error *error) {
  if ((uintptr_t)memory % CODA_ALIGNMENT != 0)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "working memory must begin at a multiple of %d bytes", CODA_ALIGNMENT);
  coda_code code = enter(session, error);
  if (code)
    return code;
  drop_working_memory(session);
  session->given = memory;
  session->given_bytes = memory ? bytes : 0;
  for (uint32_t i = 0; i < session->layout_count; i++)
    for (uint32_t phase = 0; phase < session->model->plan.phase_count; phase++)
      session->layouts[i].arenas[phase].memory = NULL;
  leave(session);
  return CODA_OK;
}

/* --- shapes ------------------------------------------------------------------------------------------------------- */

/* An unused layout, or else the least recently used one. */
static coda_layout *vacant_layout(coda_session *session, coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  coda_layout *oldest = &session->layouts[0];
  for (uint32_t i = 0; i < session->layout_count; i++)
    if (session->layouts[i].used < oldest->used)
      oldest = &session->layouts[i];
  if (session->layout_count && (oldest->used == 0 || session->layout_count == MAX_LAYOUTS)) {
    if (session->last == oldest)
      session->last = NULL;
    return oldest;
  }
  coda_layout *fresh = &session->layouts[session->layout_count];
  coda_block *memory = &session->layout_memory[session->layout_count];
  if (coda_block_reserve(memory, coda_layout_bytes(plan), CODA_ALIGNMENT, &session->allocator)) {
    coda_fail(error, CODA_ERROR_MEMORY, "no memory to lay out another shape");
    return NULL;
  }
  coda_layout_attach(fresh, plan, memory->data);
  session->layout_count++;
  return fresh;
}

static coda_code find_layout(coda_session *session, const coda_tensor *inputs, coda_layout **result,
                             coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  coda_code code = coda_layout_check_types(plan, inputs, error);
  if (code)
    return code;
  coda_layout *layout = NULL;
  for (uint32_t i = 0; i < session->layout_count && !layout; i++)
    if (session->layouts[i].used && coda_layout_matches(&session->layouts[i], plan, inputs))
      layout = &session->layouts[i];
  if (!layout) {
    layout = vacant_layout(session, error);
    code = layout ? coda_layout_make(layout, plan, inputs, session->order, error) : CODA_ERROR_MEMORY;
    if (code)
      return code;
  }
  layout->used = ++session->clock;
  *result = layout;
  return CODA_OK;
}

static void describe_outputs(const coda_session *session, const coda_layout *layout, uint32_t phase,
                             coda_tensor *outputs) {
  const coda_plan *plan = &session->model->plan;
  for (uint32_t i = 0; i < plan->output_count; i++) {
    if (plan->outputs[i].phase != phase)
      continue;
    outputs[i].dtype = plan->outputs[i].dtype;
    outputs[i].rank = (int32_t)plan->outputs[i].rank;
    outputs[i].bytes = (size_t)layout->tensor_bytes[plan->input_count + i];
    for (uint32_t axis = 0; axis < plan->outputs[i].rank; axis++)
      outputs[i].dims[axis] = layout->values[plan->outputs[i].dims[axis]];
  }
}

/* Outputs whose dimensions data decides: what is known of them before a run. */
static void describe_unknown_outputs(const coda_session *session, const coda_layout *layout, coda_tensor *outputs) {
  const coda_plan *plan = &session->model->plan;
  for (uint32_t i = 0; i < plan->output_count; i++) {
    const plan_tensor *t = &plan->outputs[i];
    if (t->phase == 0)
      continue;
    outputs[i].dtype = t->dtype;
    outputs[i].rank = (int32_t)t->rank;
    outputs[i].bytes = 0;
    for (uint32_t axis = 0; axis < t->rank; axis++)
      outputs[i].dims[axis] = plan->exprs[t->dims[axis]].phase ? -1 : layout->values[t->dims[axis]];
  }
}

coda_code coda_session_shapes(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs,
                              coda_error *error) {
  coda_layout *layout = NULL;
  coda_code code = check_arguments(session, inputs, outputs != NULL, error);
  if (!code)
    code = enter(session, error);
  if (code)
    return code;
  code = find_layout(session, inputs, &layout, error);
  if (!code) {
    describe_outputs(session, layout, 0, outputs);
    describe_unknown_outputs(session, layout, outputs);
  }
  leave(session);
  return code;
}

static size_t scratch_stride(const coda_layout *layout) { return padded(layout->scratch_bytes + 1); }

coda_code coda_session_memory_bytes(coda_session *session, const coda_tensor *inputs, size_t *bytes,
                                    coda_error *error) {
  coda_layout *layout = NULL;
  if (!bytes)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_session_memory_bytes needs a place for the number");
  coda_code code = check_arguments(session, inputs, true, error);
  if (!code)
    code = enter(session, error);
  if (code)
    return code;
  code = find_layout(session, inputs, &layout, error);
  if (!code)
    *bytes = padded(layout->arenas[0].bytes) + scratch_stride(layout) * (size_t)session->threads;
  leave(session);
  return code;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static coda_code check_inputs(const coda_session *session, const coda_layout *layout, const coda_tensor *inputs,
                              coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  for (uint32_t i = 0; i < plan->input_count; i++) {
    const size_t need = (size_t)layout->tensor_bytes[i], size = coda_dtype_size(plan->inputs[i].dtype);
    if (need && !inputs[i].data)
      return coda_fail(error, CODA_ERROR_SHAPE, "input '%s' has no data", plan->inputs[i].name);
    if (inputs[i].bytes < need)
      return coda_fail(error, CODA_ERROR_SHAPE, "input '%s' has %zu bytes, expected %zu", plan->inputs[i].name,
                       inputs[i].bytes, need);
    if ((uintptr_t)inputs[i].data % size != 0)
      return coda_fail(error, CODA_ERROR_ARGUMENT, "input '%s' is not aligned to its elements of %zu bytes",
                       plan->inputs[i].name, size);
  }
  return CODA_OK;
}

static coda_code check_outputs(const coda_session *session, const coda_layout *layout, uint32_t phase,
                               const coda_tensor *outputs, coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  for (uint32_t i = 0; i < plan->output_count; i++) {
    if (plan->outputs[i].phase != phase)
      continue;
    const size_t need = (size_t)layout->tensor_bytes[plan->input_count + i],
                 size = coda_dtype_size(plan->outputs[i].dtype);
    if (outputs[i].data && outputs[i].bytes < need)
      return coda_fail(error, CODA_ERROR_SHAPE, "output '%s' has room for %zu bytes, expected %zu",
                       plan->outputs[i].name, outputs[i].bytes, need);
    if ((uintptr_t)outputs[i].data % size != 0)
      return coda_fail(error, CODA_ERROR_ARGUMENT, "output '%s' is not aligned to its elements of %zu bytes",
                       plan->outputs[i].name, size);
  }
  return CODA_OK;
}

/* Scratch of all threads lies at the end of the caller's memory, the arenas of the phases at its beginning. */
static coda_code use_given(coda_session *session, const coda_layout *layout, uint32_t phase, size_t scratch,
                           coda_error *error) {
  size_t begin = 0;
  for (uint32_t i = 0; i < phase; i++)
    begin += padded(layout->arenas[i].bytes);
  const size_t arena = padded(layout->arenas[phase].bytes),
               room = session->given_bytes / CODA_ALIGNMENT * CODA_ALIGNMENT;
  if (begin > room || arena > room - begin || scratch > room - begin - arena)
    return coda_fail(error, CODA_ERROR_MEMORY, "the run needs %zu bytes of working memory, it was given %zu",
                     begin + arena + scratch, session->given_bytes);
  session->arenas[phase] = (coda_block){session->given + begin, arena};
  session->scratch = (coda_block){session->given + room - scratch, scratch};
  return CODA_OK;
}

static coda_code reserve(coda_session *session, coda_layout *layout, uint32_t phase, const coda_tensor *outputs,
                         coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  coda_block *arena = &session->arenas[phase];
  size_t owned = 0, scratch = 0;
  bool fits = true;
  for (uint32_t i = 0; i < plan->output_count; i++)
    if (!outputs[i].data && plan->outputs[i].phase == phase) /* one byte more: an empty output has an address too */
      fits = fits && coda_add_size(owned, padded((size_t)layout->tensor_bytes[plan->input_count + i] + 1), &owned);
  const size_t bytes = layout->arenas[phase].bytes;
  session->scratch_stride = scratch_stride(layout);
  fits = fits && coda_mul_size(session->scratch_stride, (size_t)session->threads, &scratch);
  coda_code code = CODA_OK;
  if (fits && session->given)
    code = use_given(session, layout, phase, scratch, error);
  else
    fits = fits && !coda_block_reserve(arena, bytes + CODA_ALIGNMENT, CODA_ALIGNMENT, &session->allocator) &&
           !coda_block_reserve(&session->scratch, scratch, CODA_ALIGNMENT, &session->allocator);
  if (code)
    return code;
  if (!fits || coda_block_reserve(&session->owned[phase], owned, CODA_ALIGNMENT, &session->allocator))
    return coda_fail(error, CODA_ERROR_MEMORY, "no memory for an arena of %zu bytes, scratch of %zu and outputs of %zu",
                     bytes, scratch, owned);
  if (layout->arenas[phase].memory != arena->data)
    coda_layout_place(layout, plan, phase, session->model->constants.data, session->model->repacked.data, arena->data);
  return CODA_OK;
}

static void place_io(coda_session *session, coda_layout *layout, uint32_t phase, const coda_tensor *inputs,
                     coda_tensor *outputs) {
  const plan_tensor *infos = session->model->plan.outputs;
  uint8_t *owned = session->owned[phase].data;
  for (uint32_t i = 0; i < session->model->plan.output_count; i++)
    if (!outputs[i].data && infos[i].phase == phase) {
      outputs[i].data = owned;
      owned += padded(outputs[i].bytes + 1);
    }
  for (uint32_t i = 0; i < session->slot_count; i++) {
    const io_slot *s = &session->slots[i];
    if (s->output ? infos[s->index].phase == phase : phase == 0)
      layout->addresses[s->slot] = (uintptr_t)(s->output ? outputs[s->index].data : inputs[s->index].data);
  }
}

/* All that comes before the steps of a phase, once it is laid out. */
static coda_code prepare(coda_session *session, coda_layout *layout, uint32_t phase, const coda_tensor *inputs,
                         coda_tensor *outputs, coda_error *error) {
  coda_code code = check_outputs(session, layout, phase, outputs, error);
  if (!code)
    code = reserve(session, layout, phase, outputs, error);
  if (!code) {
    describe_outputs(session, layout, phase, outputs);
    place_io(session, layout, phase, inputs, outputs);
  }
  return code;
}

/* One of the numbers that follow from a seed (Steele, Lea and Flood 2014, SplitMix64). */
static int64_t draw(uint64_t *state) {
  uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (int64_t)(x ^ (x >> 31));
}

/* One step, as its chunks see it. */
typedef struct {
  const coda_session *session;
  const plan_step *step;
  coda_kernel kernel;
  const uint64_t *addresses;
  const int64_t *ints;
} call;

static int32_t run_chunk(void *context, int64_t begin, int64_t end, int thread) {
  const call *c = context;
  const coda_session *session = c->session;
  if (atomic_load_explicit(&session->cancelled, memory_order_relaxed))
    return CANCELLED;
  uint64_t *buffers = session->frames + (size_t)thread * session->frame_words;
  int64_t *ints = (int64_t *)(buffers + session->frame_ints);
  const uint32_t operands = c->step->buffer_count, sizes = c->step->int_count;
  memcpy(buffers, c->addresses, operands * sizeof *buffers);
  buffers[operands] = (uintptr_t)(session->scratch.data + (size_t)thread * session->scratch_stride);
  memcpy(ints, c->ints, sizes * sizeof *ints);
  ints[sizes] = begin;
  ints[sizes + 1] = end;
  return c->kernel(buffers, ints);
}

static coda_code step_failed(const plan_step *step, int32_t result, coda_error *error) {
  const char *from = *step->source ? ", from " : "";
  if (result == CANCELLED)
    return coda_fail(error, CODA_ERROR_CANCELLED, "the run was cancelled in step '%s'", step->name);
  if (result == ERROR_INDEX)
    return coda_fail(error, CODA_ERROR_DATA, "an index is out of range in step '%s'%s%s", step->name, from,
                     step->source);
  return coda_fail(error, CODA_ERROR_DATA, "kernel error %" PRId32 " in step '%s'%s%s", result, step->name, from,
                   step->source);
}

/* About how long a step takes one thread: only the order of magnitude matters. A core does some 64 operations and moves
 * some 16 bytes a nanosecond. */
static int64_t cost_ns(const coda_layout *layout, const plan_step *step) {
  return layout->values[step->flops] / 64 + layout->values[step->bytes] / 16;
}

static coda_code run_steps(coda_session *session, coda_layout *layout, const coda_tensor *inputs, coda_tensor *outputs,
                           coda_error *error) {
  const coda_plan *plan = &session->model->plan;
  call c = {.session = session, .addresses = layout->addresses, .ints = layout->ints};
  uint32_t phase = 0;
  for (uint32_t i = 0; i < plan->step_count; i++) {
    c.step = &plan->steps[i];
    while (phase < c.step->phase) {
      coda_code code = coda_layout_continue(layout, plan, ++phase, inputs, outputs, session->order, error);
      if (!code)
        code = prepare(session, layout, phase, inputs, outputs, error);
      if (code)
        return code;
    }
    const int64_t items = layout->values[c.step->items], begin = session->timer ? coda_clock_ns() : 0;
    int32_t result = 0;
    if (items) {
      c.kernel = session->model->kernels[c.step->kernel];
      result = coda_pool_for(session->pool, items, c.step->grain, cost_ns(layout, c.step), run_chunk, &c);
      if (!result && c.step->finish >= 0) {
        c.kernel = session->model->kernels[c.step->finish];
        result = run_chunk(&c, 0, items, 0);
      }
    }
    if (result)
      return step_failed(c.step, result, error);
    c.addresses += c.step->buffer_count;
    c.ints += c.step->int_count;
    if (session->timer)
      session->timer(session->timer_context, i, c.step->name, begin, coda_clock_ns());
  }
  return CODA_OK;
}

/* The constants of a bundle, once, by the session that runs first. */
static coda_code verify(const coda_session *session, coda_error *error) {
  coda_model *model = session->model;
  if (atomic_load_explicit(&model->verified, memory_order_relaxed))
    return CODA_OK;
  const coda_code code = model->verify(model, session->pool, &session->allocator, error);
  if (!code)
    atomic_store_explicit(&model->verified, true, memory_order_relaxed);
  return code;
}

static coda_code run(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs, coda_error *error) {
  coda_layout *layout = NULL;
  coda_code code = verify(session, error);
  if (!code)
    code = find_layout(session, inputs, &layout, error);
  if (!code)
    code = check_inputs(session, layout, inputs, error);
  if (!code)
    code = prepare(session, layout, 0, inputs, outputs, error);
  if (!code) {
    const int64_t number = draw(&session->random);
    for (uint32_t i = 0; i < session->run_count; i++)
      layout->ints[session->run_ints[i]] = number;
    code = run_steps(session, layout, inputs, outputs, error);
    session->last = code ? NULL : layout;
  }
  return code;
}

coda_code coda_session_run(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs, coda_error *error) {
  coda_code code = check_arguments(session, inputs, outputs != NULL, error);
  if (!code)
    code = enter(session, error);
  if (code)
    return code;
  if (session->lent)
    coda_pool_expect(session->pool, 1);
  coda_pool_begin(session->pool);
  code = run(session, inputs, outputs, error);
  coda_pool_end(session->pool);
  leave(session);
  return code;
}

/* A run on lent threads: whichever comes first leads it, the others help until it is over. */
typedef struct {
  coda_session *session;
  const coda_tensor *inputs;
  coda_tensor *outputs;
  coda_error *error;
  coda_code code;
  _Atomic int32_t arrived, helped;
} lent_run;

static void join(void *argument, size_t index) {
  lent_run *r = argument;
  (void)index;
  const int32_t place = atomic_fetch_add(&r->arrived, 1);
  if (place == 0) {
    r->code = run(r->session, r->inputs, r->outputs, r->error);
    coda_pool_end(r->session->pool);
  } else if (coda_pool_help(r->session->pool, place)) {
    atomic_fetch_add_explicit(&r->helped, 1, memory_order_relaxed);
  }
}

coda_code coda_session_run_on(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs,
                              coda_parallel parallel, void *context, coda_error *error) {
  coda_code code = check_arguments(session, inputs, outputs != NULL, error);
  if (!code && (!session->lent || !parallel))
    code = coda_fail(error, CODA_ERROR_ARGUMENT,
                     "a run on lent threads needs a session made with `lent`, and who lends them");
  if (!code)
    code = enter(session, error);
  if (code)
    return code;
  lent_run r = {.session = session, .inputs = inputs, .outputs = outputs, .error = error};
  coda_pool_expect(session->pool, session->met ? session->met : session->threads);
  coda_pool_begin(session->pool);
  parallel(context, join, (size_t)session->threads, &r);
  if (r.arrived == 0) /* nobody was lent */
    join(&r, 0);
  if (r.helped + 1 > session->met)
    session->met = r.helped + 1;
  leave(session);
  return r.code;
}

size_t coda_session_costs(const coda_session *session, coda_step_cost *costs, size_t capacity) {
  const coda_plan *plan = &session->model->plan;
  if (!session->last)
    return 0;
  for (uint32_t i = 0; i < plan->step_count && i < capacity; i++)
    costs[i] =
        (coda_step_cost){session->last->values[plan->steps[i].flops], session->last->values[plan->steps[i].bytes]};
  return plan->step_count;
}

int coda_session_data_size(const coda_session *session, size_t index, const char **name, int64_t *value) {
  if (!session->last || index >= session->model->plan.read_count)
    return -1;
  *name = session->model->plan.reads[index].name;
  *value = session->last->data[index];
  return 0;
}

size_t coda_session_arena_bytes(const coda_session *session) {
  size_t bytes = 0;
  for (uint32_t i = 0; session->last && i < session->model->plan.phase_count; i++)
    bytes += session->last->arenas[i].bytes;
  return bytes;
}
