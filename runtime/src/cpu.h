/* What this CPU can do. */
#ifndef CODA_CPU_H
#define CODA_CPU_H

#include <stdbool.h>

/* Whether `name` is a feature of this CPU that the operating system has enabled. */
bool coda_cpu_has(const char *name);

#endif
