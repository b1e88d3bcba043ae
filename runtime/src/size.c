/* The size table: its values for one run, and its text. */
#include "checked.h"
#include "plan.h"
#include "text.h"

/* Rounds towards minus infinity, unlike C; b > 0. */
static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* Whether the result is representable; divisors have been checked. */
static bool apply(uint32_t op, int64_t a, int64_t b, int64_t *result) {
  switch (op) {
  case EXPR_ADD: return coda_add_i64(a, b, result);
  case EXPR_MUL: return coda_mul_i64(a, b, result);
  case EXPR_FLOORDIV: *result = floor_div(a, b); return true;
  case EXPR_MOD: *result = a % b < 0 ? a % b + b : a % b; return true;
  case EXPR_MAX: *result = a > b ? a : b; return true;
  default: *result = a < b ? a : b; return true;
  }
}

coda_code coda_plan_evaluate(const coda_plan *plan, uint32_t phase, const int64_t *symbols, const int64_t *data,
                             int64_t *values, coda_error *error) {
  char text[128];
  for (uint32_t i = 0; i < plan->expr_count; i++) {
    const plan_expr *e = &plan->exprs[i];
    if (e->phase != phase)
      continue;
    if (e->op == EXPR_CONST) {
      values[i] = e->a;
    } else if (e->op == EXPR_SYMBOL) {
      values[i] = symbols[e->a];
    } else if (e->op == EXPR_DATA) {
      values[i] = data[e->a];
    } else if ((e->op == EXPR_FLOORDIV || e->op == EXPR_MOD) && values[e->b] <= 0) {
      coda_plan_format(plan, i, text, sizeof text);
      return coda_fail(error, CODA_ERROR_SHAPE, "size %s divides by %" PRId64 " for these inputs", text, values[e->b]);
    } else if (!apply(e->op, values[e->a], values[e->b], &values[i])) {
      coda_plan_format(plan, i, text, sizeof text);
      return coda_fail(error, CODA_ERROR_SHAPE, "size %s is beyond 64 bits for these inputs", text);
    }
  }
  return CODA_OK;
}

typedef struct {
  char *text;
  size_t capacity, length;
  bool cut;
} writer;

static void put(writer *w, const char *text) {
  const size_t n = coda_length(text);
  if (w->cut || n >= w->capacity - w->length) {
    w->cut = true;
    return;
  }
  memcpy(w->text + w->length, text, n + 1);
  w->length += n;
}

/* `depth` bounds the recursion: a table may share one entry many times over. */
static void format(const coda_plan *plan, uint32_t index, bool inner, int depth, writer *w) {
  static const struct {
    const char *before, *between, *after;
    bool infix;
  } FORMS[EXPR_OPS] = {
      [EXPR_ADD] = {"", " + ", "", true},      [EXPR_MUL] = {"", "*", "", true},
      [EXPR_FLOORDIV] = {"", "//", "", true},  [EXPR_MOD] = {"", " % ", "", true},
      [EXPR_MAX] = {"max(", ", ", ")", false}, [EXPR_MIN] = {"min(", ", ", ")", false},
  };
  const plan_expr *e = &plan->exprs[index];
  char number[24];
  if (w->cut || depth == 0) {
    w->cut = true;
  } else if (e->op == EXPR_CONST) {
    coda_print(number, sizeof number, "%" PRId64, e->a);
    put(w, number);
  } else if (e->op == EXPR_SYMBOL) {
    put(w, plan->symbols[e->a]);
  } else if (e->op == EXPR_DATA) {
    put(w, plan->reads[e->a].name);
  } else if (e->op == EXPR_RUN) {
    put(w, "run");
  } else {
    const bool parentheses = inner && FORMS[e->op].infix;
    put(w, parentheses ? "(" : FORMS[e->op].before);
    format(plan, (uint32_t)e->a, FORMS[e->op].infix, depth - 1, w);
    put(w, FORMS[e->op].between);
    format(plan, (uint32_t)e->b, FORMS[e->op].infix, depth - 1, w);
    put(w, parentheses ? ")" : FORMS[e->op].after);
  }
}

void coda_plan_format(const coda_plan *plan, uint32_t index, char *text, size_t capacity) {
  enum { ELLIPSIS = 4, MAX_DEPTH = 64 };
  writer w = {text, capacity - ELLIPSIS, 0, false};
  text[0] = 0;
  format(plan, index, false, MAX_DEPTH, &w);
  if (w.cut)
    memcpy(text + w.length, "...", ELLIPSIS);
}
