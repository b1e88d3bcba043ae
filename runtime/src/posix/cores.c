/* How many threads this process can run at once: the physical cores of its affinity, less what its control group's
 * quota leaves. */
#include "cores.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coda.h"

enum { PATH = 1024 };

/* The file FOLDER/NAME; NULL when it cannot be read. */
static FILE *open_in(const char *folder, const char *name) {
  char path[PATH];
  const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
  return length > 0 && (size_t)length < sizeof path ? fopen(path, "re") : NULL;
}

/* Whether a list of CPUs such as "0,64" or "0-1" (Linux, cpulist) has one of `cpus` below `cpu`. */
static bool has_lower(const char *list, const cpu_set_t *cpus, int cpu) {
  for (char *end; *list; list = *end == ',' ? end + 1 : end) {
    const long first = strtol(list, &end, 10);
    long last = first;
    if (end == list)
      return false;
    if (*end == '-')
      last = strtol(end + 1, &end, 10);
    for (long i = first; i <= last && i < cpu; i++)
      if (CPU_ISSET((size_t)i, cpus))
        return true;
    if (*end != ',')
      return false;
  }
  return false;
}

/* Of hardware threads that share a core, one counts. */
static int physical_cores(const cpu_set_t *cpus, const char *root) {
  char name[64], list[PATH];
  int count = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET((size_t)cpu, cpus))
      continue;
    snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *file = open_in(root, name);
    const bool known = file && fgets(list, sizeof list, file);
    if (file)
      fclose(file);
    count += !known || !has_lower(list, cpus, cpu);
  }
  return count;
}

static int read_numbers(const char *folder, const char *name, long *first, long *second) {
  FILE *file = open_in(folder, name);
  if (!file)
    return 0;
  const int fields = fscanf(file, "%ld %ld", first, second);
  fclose(file);
  return fields;
}

/* The lesser of `cores` and what a group's quota allows, rounded up. Version 2 of control groups has "quota period" or
 * "max period" in one file, version 1 a file for each, and -1 for no quota. */
static int within_quota(int cores, const char *folder) {
  long quota = 0, period = 0, ignored;
  if (read_numbers(folder, "cpu.max", &quota, &period) != 2 &&
      (read_numbers(folder, "cpu.cfs_quota_us", &quota, &ignored) < 1 ||
       read_numbers(folder, "cpu.cfs_period_us", &period, &ignored) < 1))
    return cores;
  if (quota <= 0 || period <= 0)
    return cores;
  const long allowed = (quota + period - 1) / period;
  return allowed < cores ? (int)allowed : cores;
}

/* A limit may stand on any ancestor of the group; in a container the group's own path may not be there, but its root
 * is. */
static int within_quotas(int cores, const char *root, const char *hierarchy, const char *group) {
  char folder[PATH];
  const int length = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s%s", root, hierarchy, group);
  if (length < 0 || (size_t)length >= sizeof folder)
    return cores;
  char *below = folder + length - strlen(group);
  for (;;) {
    cores = within_quota(cores, folder);
    char *slash = strrchr(below, '/');
    if (!slash)
      return cores;
    *slash = 0;
  }
}

/* Whether `name` is in the comma-separated list text[0, length). */
static bool lists(const char *text, size_t length, const char *name) {
  const size_t size = strlen(name);
  for (const char *end = text + length; text < end;) {
    const char *comma = memchr(text, ',', (size_t)(end - text));
    const char *stop = comma ? comma : end;
    if ((size_t)(stop - text) == size && memcmp(text, name, size) == 0)
      return true;
    text = stop + 1;
  }
  return false;
}

int coda_cores(const cpu_set_t *cpus, const char *root) {
  char line[PATH];
  int cores = physical_cores(cpus, root);
  cores = within_quotas(cores, root, "", "");
  cores = within_quotas(cores, root, "/cpu", "");
  FILE *file = open_in(root, "proc/self/cgroup");
  while (file && fgets(line, sizeof line, file)) { /* number:controllers:group, version 2 has no controllers */
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group)
      continue;
    line[strcspn(line, "\n")] = 0;
    controllers++;
    const size_t length = (size_t)(group - controllers);
    if (length == 0)
      cores = within_quotas(cores, root, "", group + 1);
    else if (lists(controllers, length, "cpu"))
      cores = within_quotas(cores, root, "/cpu", group + 1);
  }
  if (file)
    fclose(file);
  return cores > 0 ? cores : 1;
}

int32_t coda_cpu_cores(void) {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) { /* more CPUs than the set can hold */
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    CPU_ZERO(&cpus);
    for (long cpu = 0; cpu < online && cpu < CPU_SETSIZE; cpu++)
      CPU_SET((size_t)cpu, &cpus);
  }
  return coda_cores(&cpus, "");
}
