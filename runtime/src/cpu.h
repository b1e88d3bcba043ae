/* What this CPU can do, and how many of its cores this process may use. */
#ifndef CODA_CPU_H
#define CODA_CPU_H

#include <stdbool.h>

/* Whether `name` is a feature of this CPU that the operating system has enabled. */
bool coda_cpu_has(const char *name);

/* The cores that the affinity mask and the CPU quota of the control group allow; at least 1. */
int coda_cpu_cores(void);

#endif
