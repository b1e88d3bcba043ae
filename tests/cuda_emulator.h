// Runs the CUDA C of a kernel on a CPU, so that its indexing, barriers and asynchronous copies are tested without a GPU.
//
// Threads of a block are fibers that yield at barriers and at instructions of a whole warp. Asynchronous copies happen as
// early as the hardware may do them (`lazy` = 0) or as late (1): a missing wait or barrier gives wrong results in one of the two.
// Vectors have the alignment that a GPU demands: compile with -fsanitize=alignment.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

typedef unsigned int uint;
typedef unsigned char uchar;
typedef _Float16 half;
struct alignas(4) half2 { half x, y; };
struct alignas(8) half4 { half x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
#define __global__
#define __shared__
#define __align__(n)
#define __launch_bounds__(n)
#define __device__
#define __forceinline__ static inline

template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

#define __expf expf
static float __fdividef(float a, float b) { return a / b; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }

extern "C" { alignas(1024) uchar shared_ptr[256 << 10]; }
static struct { unsigned x, y, z; } threadIdx, blockIdx;

namespace emulator {

struct Copy {
  void *to;
  const void *from;
  int count;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  unsigned barriers, collectives;
  bool done;
};

struct Warp {
  unsigned deposits[2];
  unsigned words[2][32][6];
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static unsigned arrivals, running;
static bool lazy;

static void yield() { swapcontext(&fibers[running].context, &scheduler); }

static void perform(const Copy &copy) {
  memcpy(copy.to, copy.from, copy.count);
  memset((char *)copy.to + copy.count, 0, 16 - copy.count);
}

static void barrier() {
  unsigned all = ++fibers[running].barriers * fibers.size();
  ++arrivals;
  while (arrivals < all) yield();
}

// Each lane gives some words; returns what all lanes of the warp gave.
static unsigned (*exchange(const unsigned *words, int count))[6] {
  Warp &warp = warps[running / 32];
  unsigned turn = fibers[running].collectives++, slot = turn % 2;
  memcpy(warp.words[slot][running % 32], words, count * sizeof *words);
  ++warp.deposits[slot];
  while (warp.deposits[slot] < (turn / 2 + 1) * 32) yield();
  return warp.words[slot];
}

template <class... Args> static void nothing(Args...) {}

static float as_float(unsigned word, int which) {
  uint16_t bits = (uint16_t)(word >> 16 * which);
  half value;
  memcpy(&value, &bits, sizeof value);
  return (float)value;
}

template <class... P, size_t... I>
static void call(void (*kernel)(P...), void **args, std::index_sequence<I...>) {
  kernel(*(P *)args[I]...);
}

template <class... P> struct Start {
  static inline void (*kernel)(P...);
  static inline void **args;
  static void run() {
    call(kernel, args, std::index_sequence_for<P...>{});
    fibers[running].done = true;
    yield();
  }
};

static void run_block(unsigned threads, void (*start)()) {
  if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>((threads + 31) / 32);
  arrivals = 0;
  memset(shared_ptr, 0xff, sizeof shared_ptr);
  for (Fiber &fiber : fibers) {
    fiber.stack.resize(128 << 10);
    fiber.groups.clear();
    fiber.open.clear();
    fiber.barriers = fiber.collectives = 0;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  for (unsigned left = threads; left;) {
    for (running = 0; running < threads; ++running) {
      if (fibers[running].done) continue;
      threadIdx.x = running;
      swapcontext(&scheduler, &fibers[running].context);
      left -= fibers[running].done;
    }
  }
}

template <class... P> static void launch(void (*kernel)(P...), const int *grid, int threads, void **args, int late) {
  Start<P...>::kernel = kernel;
  Start<P...>::args = args;
  lazy = late;
  for (blockIdx.z = 0; blockIdx.z < (unsigned)grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < (unsigned)grid[1]; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < (unsigned)grid[0]; ++blockIdx.x) run_block(threads, Start<P...>::run);
}

}  // namespace emulator

// D (16 rows, 8 columns): lane l has rows l / 4 and l / 4 + 8 of columns 2 (l mod 4) and the next. A and B: PTX ISA, mma.m16n8k16.
static void coda_mma(float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
  unsigned given[6] = {a0, a1, a2, a3, b0, b1}, lane = emulator::running % 32;
  unsigned(*words)[6] = emulator::exchange(given, 6);
  float *d[4] = {&d0, &d1, &d2, &d3};
  for (int e = 0; e < 4; ++e) {
    unsigned row = lane / 4, column = lane % 4 * 2 + e % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      float a = emulator::as_float(words[row * 4 + k % 8 / 2][e / 2 + k / 8 * 2], k % 2);
      float b = emulator::as_float(words[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
      sum += (double)a * b;
    }
    *d[e] += (float)sum;
  }
}

static void coda_ldmatrix(unsigned &d0, unsigned &d1, unsigned &d2, unsigned &d3, const void *row) {
  if ((uintptr_t)row % 16) abort();
  uintptr_t address = (uintptr_t)row;
  unsigned given[2] = {(unsigned)address, (unsigned)(address >> 32)}, lane = emulator::running % 32;
  unsigned(*words)[6] = emulator::exchange(given, 2);
  unsigned *d[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; ++i) {
    unsigned *from = words[i * 8 + lane / 4];
    memcpy(d[i], (const char *)(from[0] | (uintptr_t)from[1] << 32) + lane % 4 * 4, 4);
  }
}

static void coda_ldmatrix_turned(unsigned &d0, unsigned &d1, unsigned &d2, unsigned &d3, const void *row) {
  if ((uintptr_t)row % 16) abort();
  uintptr_t address = (uintptr_t)row;
  unsigned given[2] = {(unsigned)address, (unsigned)(address >> 32)}, lane = emulator::running % 32;
  unsigned(*words)[6] = emulator::exchange(given, 2);
  unsigned *d[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; ++i) {
    uint16_t both[2];
    for (int e = 0; e < 2; ++e) {
      unsigned *from = words[i * 8 + lane % 4 * 2 + e];
      memcpy(&both[e], (const char *)(from[0] | (uintptr_t)from[1] << 32) + lane / 4 * 2, 2);
    }
    memcpy(d[i], both, 4);
  }
}

static unsigned coda_halves(float low, float high) {
  half both[2] = {(half)low, (half)high};
  unsigned word;
  memcpy(&word, both, sizeof word);
  return word;
}

static void coda_move(void *to, const void *from) { *(uint4 *)to = *(const uint4 *)from; }

static int coda_any(int mine) {
  static int answers[2];
  unsigned turn = emulator::fibers[emulator::running].barriers / 2 % 2;
  if (mine) answers[turn] = 1;
  emulator::barrier();
  int found = answers[turn];
  emulator::barrier();
  answers[turn] = 0;
  return found;
}

static void coda_copy(void *to, const void *from, int count) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) abort();
  emulator::Copy copy = {to, from, count};
  if (emulator::lazy) emulator::fibers[emulator::running].open.push_back(copy);
  else emulator::perform(copy);
}

static void coda_gather(void *to, const half *from, int count) {
  if ((uintptr_t)to % 16) abort();
  emulator::perform({to, from, count * 2});
}

static void coda_commit() {
  emulator::Fiber &fiber = emulator::fibers[emulator::running];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

static void coda_wait(int pending) {
  auto &groups = emulator::fibers[emulator::running].groups;
  for (int i = 0; i + pending < (int)groups.size(); ++i) {
    for (const emulator::Copy &copy : groups[i]) emulator::perform(copy);
    groups[i].clear();
  }
}

// Kernels run one after the other: none starts early.
static void coda_precede() {}
static void coda_follow() {}

static void coda_barrier() { emulator::barrier(); }

static float coda_block_sum(float x) {
  static float given[1024];
  given[emulator::running] = x;
  emulator::barrier();
  float total = 0;
  for (size_t i = 0; i < emulator::fibers.size(); ++i) total += given[i];
  emulator::barrier();
  return total;
}

// Not where others wait at a barrier.
static void coda_leave() {
  emulator::fibers[emulator::running].done = true;
  emulator::yield();
}

static void coda_put(void *to, float a, float b, float c, float d) { *(float4 *)to = {a, b, c, d}; }

static void coda_take(const void *from, float &a, float &b, float &c, float &d) {
  float4 v = *(const float4 *)from;
  a += v.x, b += v.y, c += v.z, d += v.w;
}

static float coda_exchange(float x, int mask) {
  unsigned given;
  memcpy(&given, &x, sizeof given);
  given = emulator::exchange(&given, 1)[emulator::running % 32 ^ mask][0];
  memcpy(&x, &given, sizeof x);
  return x;
}
