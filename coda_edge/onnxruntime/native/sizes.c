/* Evaluates the size table, with sizes that are not known yet left out. */
#include "operators.h"

/* Rounds towards minus infinity, unlike C; b > 0. */
static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static bool apply(uint32_t op, int64_t a, int64_t b, int64_t *result) {
  switch (op) {
  case EXPR_ADD: return !__builtin_add_overflow(a, b, result);
  case EXPR_MUL: return !__builtin_mul_overflow(a, b, result);
  case EXPR_FLOORDIV: *result = floor_div(a, b); return true;
  case EXPR_MOD: *result = a - b * floor_div(a, b); return true;
  case EXPR_MAX: *result = a > b ? a : b; return true;
  default: *result = a < b ? a : b; return true;
  }
}

uint32_t coda_sizes(const coda_operator *op, const int64_t *symbols, const bool *known, int64_t *values, bool *found) {
  for (uint32_t i = 0; i < op->size_count; i++) {
    const coda_size *s = &op->sizes[i];
    bool have = true;
    values[i] = 0;
    if (s->op == EXPR_CONST) {
      values[i] = s->a;
    } else if (s->op == EXPR_SYMBOL) {
      values[i] = symbols[s->a];
      have = !known || known[s->a];
    } else if (found && !(found[s->a] && found[s->b])) {
      have = false;
    } else {
      const bool divides = s->op == EXPR_FLOORDIV || s->op == EXPR_MOD;
      if ((divides && values[s->b] <= 0) || !apply(s->op, values[s->a], values[s->b], &values[i]))
        return i + 1;
    }
    if (found)
      found[i] = have;
  }
  return 0;
}
