/* Messages: statuses for onnxruntime, and lines for its log. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "provider.h"

OrtStatus *status_new(const OrtApi *ort, int code, const char *format, ...) {
  char message[2 * REASON_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return ort->CreateStatus(code, message);
}

void tell(const provider *p, int severity, const char *format, ...) {
  char message[2 * REASON_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  OrtStatus *status = p->api.ort->Logger_LogMessage(p->logger, severity, message, "coda_onnxruntime", 0, p->name);
  if (status)
    p->api.ort->ReleaseStatus(status);
}

OrtStatus *status_of(const OrtApi *ort, const coda_error *error) {
  const bool callers = error->code == CODA_ERROR_ARGUMENT || error->code == CODA_ERROR_SHAPE;
  const int code = callers ? ORT_INVALID_ARGUMENT : error->code == CODA_ERROR_FILE ? ORT_NO_SUCHFILE : ORT_FAIL;
  return ort->CreateStatus(code, error->message);
}

char *text_new(const char *format, ...) {
  char *text = NULL;
  va_list arguments;
  va_start(arguments, format);
  const int length = vasprintf(&text, format, arguments);
  va_end(arguments);
  return length < 0 ? NULL : text;
}
