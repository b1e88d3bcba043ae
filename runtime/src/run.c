/* Runs a model: finds or makes the layout of the inputs' shapes, places buffers, and calls the kernels in order. */
#include "checked.h"
#include "platform.h"
#include "session.h"
#include "text.h"

enum {
  ERROR_INDEX = 1, /* the kernels' code for an index out of range */
  CANCELLED = -1, /* no kernel's code */
};

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
    begin += coda_padded(layout->arenas[i].bytes);
  const size_t arena = coda_padded(layout->arenas[phase].bytes),
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
      fits = fits && coda_add_size(owned, coda_padded((size_t)layout->tensor_bytes[plan->input_count + i] + 1), &owned);
  const bool here = !session->model->device; /* a device has its own memory */
  const size_t bytes = here ? layout->arenas[phase].bytes : 0;
  session->scratch_stride = here ? coda_session_scratch_stride(layout) : 0;
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
  if (here && layout->arenas[phase].memory != arena->data)
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
      owned += coda_padded(outputs[i].bytes + 1);
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
    coda_session_describe(session, layout, phase, outputs);
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
  buffers[operands] = (uintptr_t)session->scratch.data + (size_t)thread * session->scratch_stride;
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
    code = coda_session_find_layout(session, inputs, &layout, error);
  if (!code)
    code = check_inputs(session, layout, inputs, error);
  if (!code)
    code = prepare(session, layout, 0, inputs, outputs, error);
  if (!code) {
    const int64_t number = draw(&session->random);
    for (uint32_t i = 0; i < session->run_count; i++)
      layout->ints[session->run_ints[i]] = number;
    code = session->model->device ? session->model->device->run(session, layout, inputs, outputs, error)
                                  : run_steps(session, layout, inputs, outputs, error);
    session->last = code ? NULL : layout;
  }
  return code;
}

coda_code coda_session_run(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs, coda_error *error) {
  coda_code code = coda_session_check(session, inputs, outputs != NULL, error);
  if (!code)
    code = coda_session_enter(session, error);
  if (code)
    return code;
  if (session->lent)
    coda_pool_expect(session->pool, 1);
  coda_pool_begin(session->pool);
  code = run(session, inputs, outputs, error);
  coda_pool_end(session->pool);
  coda_session_leave(session);
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
  coda_code code = coda_session_check(session, inputs, outputs != NULL, error);
  if (!code && (!session->lent || !parallel))
    code = coda_fail(error, CODA_ERROR_ARGUMENT,
                     "a run on lent threads needs a session made with `lent`, and who lends them");
  if (!code)
    code = coda_session_enter(session, error);
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
  coda_session_leave(session);
  return r.code;
}
