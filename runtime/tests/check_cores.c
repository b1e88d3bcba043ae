/* Checks of the default number of threads. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"
#include "cores.h"

enum { PATH = 512, CPUS = 8 };

typedef struct {
  const char *path, *text;
} system_file;

/* A machine of eight CPUs, of which each two share a core. */
static const system_file TOPOLOGY[] = {
    {"/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4\n"},
    {"/sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,5\n"},
    {"/sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "2-3\n"},
    {"/sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "2-3\n"},
    {"/sys/devices/system/cpu/cpu4/topology/thread_siblings_list", "0,4\n"},
    {"/sys/devices/system/cpu/cpu5/topology/thread_siblings_list", "1,5\n"},
};

static const struct {
  const char *cpus; /* those of the affinity */
  system_file files[3];
  int cores;
} CASES[] = {
    {"01234567", {{NULL, NULL}}, 5}, /* 6 and 7 say nothing of their cores */
    {"4567", {{NULL, NULL}}, 4},
    {"04", {{NULL, NULL}}, 1},
    {"3", {{NULL, NULL}}, 1},
    {"01234567", {{"/sys/fs/cgroup/cpu.max", "300000 100000\n"}}, 3},
    {"01234567", {{"/sys/fs/cgroup/cpu.max", "max 100000\n"}}, 5},
    {"01234567", {{"/sys/fs/cgroup/cpu.max", "150000 100000\n"}}, 2},
    {"01234567", {{"/sys/fs/cgroup/cpu.max", "1000 100000\n"}}, 1},
    {"01234567", {{"/proc/self/cgroup", "0::/a/b\n"}, {"/sys/fs/cgroup/a/b/cpu.max", "200000 100000\n"}}, 2},
    {"01234567", {{"/proc/self/cgroup", "0::/a/b\n"}, {"/sys/fs/cgroup/a/cpu.max", "200000 100000\n"}}, 2},
    {"01234567", {{"/proc/self/cgroup", "0::/a/b\n"}, {"/sys/fs/cgroup/c/cpu.max", "200000 100000\n"}}, 5},
    {"01234567",
     {{"/proc/self/cgroup", "5:memory:/x\n3:cpuacct,cpu:/y/z\n"},
      {"/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "400000\n"},
      {"/sys/fs/cgroup/cpu/y/cpu.cfs_period_us", "200000\n"}},
     2},
    {"01234567",
     {{"/proc/self/cgroup", "3:cpuacct:/y\n"},
      {"/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "100000\n"},
      {"/sys/fs/cgroup/cpu/y/cpu.cfs_period_us", "100000\n"}},
     5},
    {"01234567",
     {{"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"}, {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}},
     5},
    {"01234567", {{"/sys/fs/cgroup/cpu.max", "nonsense\n"}, {"/proc/self/cgroup", "no colons\n:\n::\n"}}, 5},
};

static void write_file(const char *root, const system_file *file) {
  char path[PATH];
  snprintf(path, sizeof path, "%s%s", root, file->path);
  for (char *slash = strchr(path + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    mkdir(path, 0700);
    *slash = '/';
  }
  FILE *stream = fopen(path, "w");
  if (!stream || fputs(file->text, stream) < 0 || fclose(stream))
    exit(2);
}

void check_cores(void) {
  for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
    char root[] = "/tmp/coda-check-XXXXXX", command[PATH];
    cpu_set_t cpus;
    if (!mkdtemp(root))
      exit(2);
    for (size_t k = 0; k < sizeof TOPOLOGY / sizeof *TOPOLOGY; k++)
      write_file(root, &TOPOLOGY[k]);
    for (size_t k = 0; k < 3 && CASES[i].files[k].path; k++)
      write_file(root, &CASES[i].files[k]);
    CPU_ZERO(&cpus);
    for (size_t k = 0; k < CPUS; k++)
      if (strchr(CASES[i].cpus, (int)('0' + k)))
        CPU_SET(k, &cpus);
    const int cores = coda_cores(&cpus, root);
    if (cores != CASES[i].cores)
      printf("case %zu has %d cores, expected %d\n", i, cores, CASES[i].cores);
    CHECK(cores == CASES[i].cores);
    snprintf(command, sizeof command, "rm -r %s", root);
    if (system(command))
      exit(2);
  }
}
