/* Errors: a code and one line. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

coda_code coda_fail(coda_error *error, coda_code code, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    error->code = code;
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
  }
  return code;
}
