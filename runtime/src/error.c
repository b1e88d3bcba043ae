/* Errors: a code and one line. */
#include "error.h"

#include "text.h"

coda_code coda_fail(coda_error *error, coda_code code, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    error->code = code;
    coda_print_list(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
  }
  return code;
}
