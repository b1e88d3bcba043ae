/* What a session is made of, and what it answers; run.c runs it. */
#include "session.h"

#include "platform.h"
#include "text.h"

enum {
  MAX_THREADS = 1024,
  DEFAULT_SPIN_US = 500,
};

/* --- taking turns ------------------------------------------------------------------------------------------------- */

coda_code coda_session_check(const coda_session *session, const coda_tensor *inputs, bool outputs, coda_error *error) {
  if (!session || (!inputs && session->model->plan.input_count) || (!outputs && session->model->plan.output_count))
    return coda_fail(error, CODA_ERROR_ARGUMENT, "a run needs a session, its inputs and its outputs");
  return CODA_OK;
}

coda_code coda_session_enter(coda_session *session, coda_error *error) {
  if (atomic_flag_test_and_set_explicit(&session->busy, memory_order_acquire))
    return coda_fail(error, CODA_ERROR_ARGUMENT,
                     "the session is in use by another thread: give each thread its own, or take turns");
  return CODA_OK;
}

void coda_session_leave(coda_session *session) { atomic_flag_clear_explicit(&session->busy, memory_order_release); }

/* --- making ------------------------------------------------------------------------------------------------------- */

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
  session->frame_words = coda_padded((session->frame_ints + plan->max_ints + 2) * sizeof(uint64_t)) / sizeof(uint64_t);
  const size_t frames = (size_t)session->threads * session->frame_words * sizeof(uint64_t);
  const size_t slots = coda_padded(plan->operand_count * sizeof(io_slot));
  const size_t order = coda_padded(2 * (size_t)plan->buffer_count * sizeof(uint32_t));
  const size_t blocks = coda_padded(plan->phase_count * sizeof(coda_block));
  const size_t run_ints = coda_padded(plan->run_count * sizeof(uint32_t));
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
  if (session->model->device)
    session->model->device->free_session(session);
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
  coda_code code = coda_session_enter(session, error);
  if (code)
    return code;
  session->random = seed;
  coda_session_leave(session);
  return CODA_OK;
}

coda_code coda_session_set_timer(coda_session *session, coda_step_timer timer, void *context, coda_error *error) {
  coda_code code = coda_session_enter(session, error);
  if (code)
    return code;
  session->timer = timer;
  session->timer_context = context;
  coda_session_leave(session);
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
  coda_code code = coda_session_enter(session, error);
  if (code)
    return code;
  drop_working_memory(session);
  session->given = memory;
  session->given_bytes = memory ? bytes : 0;
  for (uint32_t i = 0; i < session->layout_count; i++)
    for (uint32_t phase = 0; phase < session->model->plan.phase_count; phase++)
      session->layouts[i].arenas[phase].memory = NULL;
  coda_session_leave(session);
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

coda_code coda_session_find_layout(coda_session *session, const coda_tensor *inputs, coda_layout **result,
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

void coda_session_describe(const coda_session *session, const coda_layout *layout, uint32_t phase,
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
  coda_code code = coda_session_check(session, inputs, outputs != NULL, error);
  if (!code)
    code = coda_session_enter(session, error);
  if (code)
    return code;
  code = coda_session_find_layout(session, inputs, &layout, error);
  if (!code) {
    coda_session_describe(session, layout, 0, outputs);
    describe_unknown_outputs(session, layout, outputs);
  }
  coda_session_leave(session);
  return code;
}

size_t coda_session_scratch_stride(const coda_layout *layout) { return coda_padded(layout->scratch_bytes + 1); }

coda_code coda_session_memory_bytes(coda_session *session, const coda_tensor *inputs, size_t *bytes,
                                    coda_error *error) {
  coda_layout *layout = NULL;
  if (!bytes)
    return coda_fail(error, CODA_ERROR_ARGUMENT, "coda_session_memory_bytes needs a place for the number");
  coda_code code = coda_session_check(session, inputs, true, error);
  if (!code)
    code = coda_session_enter(session, error);
  if (code)
    return code;
  code = coda_session_find_layout(session, inputs, &layout, error);
  if (!code)
    *bytes = coda_padded(layout->arenas[0].bytes) + coda_session_scratch_stride(layout) * (size_t)session->threads;
  coda_session_leave(session);
  return code;
}

/* --- the last run ----------------------------------------------------------------------------------------------------
 */

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
