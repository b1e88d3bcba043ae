/* How many threads this process can run at once. */
#ifndef CODA_CORES_H
#define CODA_CORES_H

#include <sched.h>

/* The physical cores among `cpus`, or fewer where the quota of a control group is less. The system's files are read
 * below `root`, which is empty but in tests. At least 1. */
int coda_cores(const cpu_set_t *cpus, const char *root);

#endif
