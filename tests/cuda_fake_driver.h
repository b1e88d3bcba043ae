// The CUDA driver's interface over the emulator: what the runtime opens as libcuda.so.1 where a model is run without a GPU.
//
// Device memory is memory of the host, full of NaN at first. Work is done when it is asked for, or, while a stream is captured, when
// the graph is launched. `KERNELS` is the table of kernels that are compiled into the library.
#include <string>

namespace fake {

struct Kernel {
  const char *name;
  void (*run)(const int *grid, int threads, void **args, int lazy);
  int parameters;
};

struct Work {
  const Kernel *kernel;
  int grid[3], threads;
  std::vector<uint64_t> values;
  void run() {
    std::vector<void *> args;
    for (uint64_t &value : values) args.push_back(&value);
    kernel->run(grid, threads, args.data(), 1);
  }
};

typedef std::vector<Work> Graph;
static Graph *capturing;
static int shared_allowed = 48 << 10;

}  // namespace fake

extern "C" {
extern const fake::Kernel KERNELS[];
extern const int KERNEL_COUNT;
extern __attribute__((weak)) int coda_overlaps;  // only in kernels that wait by themselves
int fake_graphs, fake_graph_launches, fake_launches, fake_waits;  // waits: for the stream of number 2
int fake_early;  // launches that may start before the kernel before them ends

static int devices() {
  const char *text = getenv("FAKE_CUDA_DEVICES");
  return text ? atoi(text) : 1;
}

int cuInit(unsigned) { return devices() ? 0 : 100; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = devices(); return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int) { snprintf(name, size, "Emulator"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int) {
  const bool hopper = getenv("FAKE_CUDA_HOPPER");
  *value = attribute == 75 ? (hopper ? 9 : 7) : (hopper ? 0 : 5);
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int) { *context = &fake_graphs; return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void *) { return 0; }
int cuCtxPopCurrent_v2(void **) { return 0; }
int cuModuleLoadData(void **module, const void *data) {
  *module = &fake_graphs;
  return memcmp(data, "other", 5) == 0 ? 209 : 0;
}
int cuModuleUnload(void *) { return 0; }
int cuModuleGetFunction(void **function, void *, const char *name) {
  for (int i = 0; i < KERNEL_COUNT; ++i)
    if (!strcmp(KERNELS[i].name, name)) { *function = (void *)&KERNELS[i]; return 0; }
  return 500;
}
int cuModuleGetGlobal_v2(uint64_t *address, size_t *bytes, void *, const char *name) {
  if (strcmp(name, "coda_overlaps") || !&coda_overlaps) return 500;
  *address = (uintptr_t)&coda_overlaps, *bytes = sizeof coda_overlaps;
  return 0;
}
int cuFuncSetAttribute(void *, int, int bytes) { fake::shared_allowed = bytes; return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  void *data = aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset(data, 0xff, (bytes + 255) / 256 * 256);
  *address = (uintptr_t)data;
  return 0;
}
int cuMemFree_v2(uint64_t address) { free((void *)address); return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *) { memcpy((void *)to, (void *)from, bytes); return 0; }
int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *) {
  for (size_t i = 0; i < count; ++i) ((unsigned *)to)[i] = value;
  return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = new unsigned(flags); return 0; }
int cuStreamDestroy_v2(void *stream) { delete (unsigned *)stream; return 0; }
int cuStreamSynchronize(void *stream) { fake_waits += stream == (void *)2; return 0; }
int cuStreamBeginCapture_v2(void *stream, int) {
  if (*(unsigned *)stream != 1) return 906;  // a blocking stream: work on the default stream would break the capture
  fake::capturing = new fake::Graph;
  return 0;
}
int cuStreamEndCapture(void *, void **graph) { *graph = fake::capturing; fake::capturing = nullptr; return 0; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long) {
  *executable = new fake::Graph(*(fake::Graph *)graph);
  ++fake_graphs;
  return 0;
}
int cuGraphLaunch(void *executable, void *) {
  ++fake_graph_launches;
  for (fake::Work &work : *(fake::Graph *)executable) work.run();
  return 0;
}
int cuGraphDestroy(void *graph) { delete (fake::Graph *)graph; return 0; }
int cuGraphExecDestroy(void *executable) { delete (fake::Graph *)executable; return 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared,
                   void *, void **args, void **) {
  if ((int)shared > fake::shared_allowed || threads == 0 || threads > 1024) return 1;
  fake::Work work = {(const fake::Kernel *)function, {(int)x, (int)y, (int)z}, (int)threads, {}};
  for (int i = 0; i < work.kernel->parameters; ++i) work.values.push_back(*(uint64_t *)args[i]);
  ++fake_launches;
  if (fake::capturing) fake::capturing->push_back(work);
  else work.run();
  return 0;
}
struct Config { unsigned grid[3], block[3], shared; void *stream; int *attribute; unsigned count; };
int cuLaunchKernelEx(const Config *c, void *function, void **args, void **extra) {
  if (c->count != 1 || c->attribute[0] != 6 || c->attribute[2] != 1 || !fake::capturing) return 1;
  ++fake_early;
  return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                        c->stream, args, extra);
}
int cuEventCreate(void **event, unsigned) { *event = new timespec; return 0; }
int cuEventRecord(void *event, void *) { clock_gettime(CLOCK_MONOTONIC, (timespec *)event); return 0; }
int cuEventElapsedTime(float *ms, void *begin, void *end) {
  const timespec *a = (timespec *)begin, *b = (timespec *)end;
  *ms = (float)((b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) * 1e-6);
  return 0;
}
int cuEventDestroy_v2(void *event) { delete (timespec *)event; return 0; }
int cuGetErrorString(int, const char **text) { *text = "fake"; return 0; }
}
