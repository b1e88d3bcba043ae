/* What error messages need of a C library. */
#include "text.h"

size_t coda_length(const char *text) {
  size_t n = 0;
  while (text[n])
    n++;
  return n;
}

bool coda_equal(const char *a, const char *b) {
  while (*a && *a == *b)
    a++, b++;
  return *a == *b;
}

bool coda_same_bytes(const void *a, const void *b, size_t bytes) {
  const uint8_t *x = a, *y = b;
  for (size_t i = 0; i < bytes; i++)
    if (x[i] != y[i])
      return false;
  return true;
}

typedef struct {
  char *text;
  size_t left; /* without the zero byte */
} writer;

static void put(writer *w, const char *text, size_t length) {
  for (size_t i = 0; i < length && w->left; i++, w->left--)
    *w->text++ = text[i];
}

static void put_number(writer *w, uint64_t magnitude, bool negative) {
  char digits[21];
  size_t first = sizeof digits;
  do
    digits[--first] = (char)('0' + magnitude % 10);
  while (magnitude /= 10);
  if (negative)
    digits[--first] = '-';
  put(w, digits + first, sizeof digits - first);
}

void coda_print_list(char *text, size_t capacity, const char *format, va_list arguments) {
  writer w = {text, capacity - 1};
  for (; *format; format++) {
    if (*format != '%') {
      put(&w, format, 1);
      continue;
    }
    int longs = 0;
    bool size = false;
    for (format++; *format == 'l' || *format == 'z'; format++)
      *format == 'l' ? (void)longs++ : (void)(size = true);
    if (*format == 's') {
      const char *s = va_arg(arguments, const char *);
      put(&w, s, coda_length(s));
    } else if (*format == 'd') {
      const int64_t value = longs == 2   ? va_arg(arguments, long long)
                            : longs == 1 ? va_arg(arguments, long)
                                         : va_arg(arguments, int);
      put_number(&w, value < 0 ? 0 - (uint64_t)value : (uint64_t)value, value < 0);
    } else if (*format == 'u') {
      put_number(&w,
                 size         ? va_arg(arguments, size_t)
                 : longs == 2 ? va_arg(arguments, unsigned long long)
                 : longs == 1 ? va_arg(arguments, unsigned long)
                              : va_arg(arguments, unsigned),
                 false);
    }
  }
  *w.text = 0;
}

void coda_print(char *text, size_t capacity, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  coda_print_list(text, capacity, format, arguments);
  va_end(arguments);
}
