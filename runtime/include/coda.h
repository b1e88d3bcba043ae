/* coda.h: the C interface of the coda-edge runtime.
 *
 * A *model* is an opened bundle: weights, plan and kernels. It never changes, so threads may share it. A *session* runs
 * a model: it owns the working memory and the worker threads.
 *
 * Ownership: what an `open` or `create` function returns belongs to the caller, who gives it back to the `free`
 * function of its type; NULL may be given back. Strings and arrays that a query returns belong to the model or session
 * asked.
 *
 * Threads: functions on a model may be called from any thread at any time. A session serves one thread at a time;
 * different sessions of one model run side by side. The library has no global state.
 *
 * Errors: a function that can fail returns a code, and writes code and message into `error` unless that is NULL. After
 * a failure the object may be used on; only the call failed. The library never exits, and prints nothing.
 *
 * Memory: `coda_session_run` allocates nothing when it meets a shape that it has met before. Where data decides sizes,
 * it allocates as well when one is larger than ever before.
 */
#ifndef CODA_H
#define CODA_H

#include <stddef.h>
#include <stdint.h>

#if defined(CODA_BUILD) && defined(__GNUC__)
#define CODA_API __attribute__((visibility("default")))
#else
#define CODA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface; it changes when a program compiled against an older header would break. */
#define CODA_ABI_VERSION 3

/* The greatest number of dimensions of an input or output. */
#define CODA_MAX_RANK 8

typedef enum coda_code {
  CODA_OK = 0,
  CODA_ERROR_ARGUMENT = 1, /* the call itself is wrong: NULL where something is needed, a session already in use */
  CODA_ERROR_MEMORY = 2, /* memory or threads could not be had */
  CODA_ERROR_FILE = 3, /* the file could not be opened or mapped */
  CODA_ERROR_BUNDLE = 4, /* truncated, altered, of another version, or contradicting itself */
  CODA_ERROR_TARGET = 5, /* built for another CPU */
  CODA_ERROR_SHAPE = 6, /* an input is missing, or its type or dimensions do not fit */
  CODA_ERROR_DATA = 7, /* a kernel met a value that it cannot process, such as an index out of range */
  CODA_ERROR_CANCELLED = 8, /* coda_session_cancel ended the run */
  CODA_ERROR_SIGNATURE = 9 /* not signed with the key that was asked for, or altered since */
} coda_code;

typedef struct coda_error {
  coda_code code;
  char message[1012]; /* UTF-8, always terminated; one line */
} coda_error;

/* Element types, by their numbers in ONNX's TensorProto.DataType. */
typedef enum coda_dtype {
  CODA_FLOAT32 = 1,
  CODA_UINT8 = 2,
  CODA_INT8 = 3,
  CODA_UINT16 = 4,
  CODA_INT16 = 5,
  CODA_INT32 = 6,
  CODA_INT64 = 7,
  CODA_BOOL = 9, /* one byte each, 0 or 1 */
  CODA_FLOAT16 = 10,
  CODA_FLOAT64 = 11,
  CODA_UINT32 = 12,
  CODA_UINT64 = 13,
  CODA_BFLOAT16 = 16
} coda_dtype;

typedef struct coda_model coda_model;
typedef struct coda_session coda_session;

/* A tensor in the caller's memory, row-major without gaps. An all-zero coda_tensor is one that was not given. */
typedef struct coda_tensor {
  void *data; /* aligned to its element; inputs are only read. Where a GPU runs the model, it may be the GPU's */
  size_t bytes; /* size of the memory at data */
  int32_t dtype; /* a coda_dtype */
  int32_t rank;
  int64_t dims[CODA_MAX_RANK];
} coda_tensor;

/* What a model says about an input or output. */
typedef struct coda_tensor_info {
  const char *name;
  int32_t dtype;
  int32_t rank;
  int64_t dims[CODA_MAX_RANK]; /* the size, or -1 where it depends on the inputs */
  const char *dim_text[CODA_MAX_RANK]; /* the size in words: "384", "batch", "past + seq" */
} coda_tensor_info;

/* What a model says about one kernel call of its plan. */
typedef struct coda_step_info {
  const char *name;
  const char *kernel;
  const char *source; /* the ONNX nodes that it computes */
} coda_step_info;

/* What one kernel call of the last run had to do. */
typedef struct coda_step_cost {
  int64_t flops; /* of the algorithm, at the sizes of that run */
  int64_t bytes; /* read and written, each tensor once */
} coda_step_cost;

/* Told of a kernel call of a run when it is over: its step in the model's plan, and when it began and ended on the
 * system's monotonic clock (CLOCK_MONOTONIC). */
typedef void (*coda_step_timer)(void *context, size_t step, const char *name, int64_t begin_ns, int64_t end_ns);

/* Where memory comes from. `allocate` returns NULL when it cannot; `alignment` is a power of two. */
typedef struct coda_allocator {
  void *(*allocate)(void *context, size_t bytes, size_t alignment);
  void (*release)(void *context, void *data, size_t bytes);
  void *context;
} coda_allocator;

/* Memory of the caller's that an allocator gives out piece by piece, for programs that have no other. What is given
 * back can be given out again if it was the last piece. */
typedef struct coda_region {
  uint8_t *data;
  size_t bytes;
  size_t used; /* 0 at first */
} coda_region;

/* The signature's public key (RFC 8032, Ed25519). */
#define CODA_KEY_BYTES 32

typedef struct coda_model_options {
  size_t size; /* sizeof(coda_model_options): tells which fields the caller knows */
  const char *target; /* which one of those that the bundle holds kernels for; NULL: the best that runs here */
  const coda_allocator *allocator; /* of the model's tables; NULL: the system's; copied, as the session's */
  const uint8_t *key; /* CODA_KEY_BYTES: opens only what is signed with it, and verifies all of it; NULL: any */
  int32_t verify; /* 1: opening verifies the constants; 0: the first run does; -1: nobody, unless there is a key */
  int32_t device; /* of a level for GPUs: the number of the GPU */
} coda_model_options;

/* Every kernel of every model (docs/architecture.md, "Kernels"): 0, or a positive error code. */
typedef int32_t (*coda_kernel)(const uint64_t *buffers, const int64_t *ints);

/* A model that is linked into the program, as `coda-edge package` writes it. */
#define CODA_LINKED_VERSION 1
typedef struct coda_linked_model {
  uint32_t abi; /* CODA_LINKED_VERSION */
  uint32_t kernel_count;
  const coda_kernel *kernels; /* in the plan's order */
  const uint8_t *plan, *constants; /* sections of a bundle; constants aligned to 64 bytes */
  const char *target, *metadata;
  size_t plan_bytes, constant_bytes, target_bytes, metadata_bytes;
} coda_linked_model;

typedef struct coda_session_options {
  size_t size; /* sizeof(coda_session_options): tells which fields the caller knows */
  int32_t threads; /* 0: the cores that this process may use */
  int32_t spin_us; /* how long idle workers spin before they sleep; -1: the default, 500 */
  const coda_allocator *allocator; /* NULL: the model's; copied, its context must outlive the session */
  uint64_t seed; /* of random operators that have no seed of their own; 0: another one for each session */
  int32_t lent; /* 1: no threads are started; `threads` is how many of the caller's coda_session_run_on may use */
} coda_session_options;

/* --- library ------------------------------------------------------------------------------------------------------ */

/* CODA_ABI_VERSION of the library in use. */
CODA_API uint32_t coda_abi_version(void);

/* The release, such as "0.1.0". */
CODA_API const char *coda_version(void);

/* Names of the features of this CPU that bundles may ask for ("avx2", "fma", ...), into names[0, capacity).
 * Returns how many there are, which may be more than capacity. */
CODA_API size_t coda_cpu_features(const char **names, size_t capacity);

/* How many cores this process may use, by its affinity and the quota of its control group. */
CODA_API int32_t coda_cpu_cores(void);

/* Bytes of one element; 0 for a number that is no coda_dtype. */
CODA_API size_t coda_dtype_size(int32_t dtype);

/* numpy's name of an element type ("float32"); "unknown" for a number that is no coda_dtype. */
CODA_API const char *coda_dtype_name(int32_t dtype);

/* Whether `signature`, 64 bytes, is that of message[0, size) by the owner of `key`, CODA_KEY_BYTES: 1 or 0; -1 from a
 * runtime that was built without signatures. */
CODA_API int32_t coda_signature_valid(const uint8_t *key, const void *message, size_t size, const uint8_t *signature);

/* The allocator over a region. */
CODA_API coda_allocator coda_region_allocator(coda_region *region);

/* --- model -------------------------------------------------------------------------------------------------------- */

/* Opens a bundle. The file is mapped, not read into memory: it must not be changed in place while the model lives
 * (replace it by renaming). Every field, and every checksum but that of the constants, is verified first; the
 * constants' by the first run. Opening runs no code of the bundle other than loading its kernel library; a bundle
 * without a signature is as trusted as any shared library. `options` may be NULL. */
CODA_API coda_code coda_model_open(const char *path, const coda_model_options *options, coda_model **model,
                                   coda_error *error);

/* Opens a bundle that is `length` bytes from `offset` of an open file, such as an asset of an Android package; length
 * 0: up to its end. The descriptor is not used afterwards. A bundle at an offset that is no multiple of 64 is copied.
 */
CODA_API coda_code coda_model_open_fd(int file, uint64_t offset, uint64_t length, const coda_model_options *options,
                                      coda_model **model, coda_error *error);

/* Opens a bundle in memory. `data` is not copied: it must be aligned to 64 bytes, and stay as it is until the model and
 * all its sessions are freed. */
CODA_API coda_code coda_model_open_memory(const void *data, size_t size, const coda_model_options *options,
                                          coda_model **model, coda_error *error);

/* Opens a model that is linked into the program. Its weights stay where they are. */
CODA_API coda_code coda_model_open_linked(const coda_linked_model *linked, const coda_model_options *options,
                                          coda_model **model, coda_error *error);

/* Gives up the caller's hold. Sessions hold their model themselves, so this may come before theirs. */
CODA_API void coda_model_free(coda_model *model);

CODA_API size_t coda_model_input_count(const coda_model *model);
CODA_API size_t coda_model_output_count(const coda_model *model);
CODA_API size_t coda_model_step_count(const coda_model *model);

/* Input, output, step `index`; NULL when there is none. */
CODA_API const coda_tensor_info *coda_model_input(const coda_model *model, size_t index);
CODA_API const coda_tensor_info *coda_model_output(const coda_model *model, size_t index);
CODA_API const coda_step_info *coda_model_step(const coda_model *model, size_t index);

/* Entry `index` of the metadata; returns 0, or -1 when there is none. */
CODA_API int coda_model_metadata(const coda_model *model, size_t index, const char **key, const char **value);

/* The target whose kernels are used, such as "x86-64-v3". */
CODA_API const char *coda_model_target(const coda_model *model);

/* Target `index` that the bundle holds kernels for, best last; NULL when there is none. */
CODA_API const char *coda_model_held_target(const coda_model *model, size_t index);

/* CPU feature `index` that the kernels in use need; NULL when there is none. */
CODA_API const char *coda_model_feature(const coda_model *model, size_t index);

/* Bytes of constants, as stored. A level whose layout is not the stored one has a copy of its own as well. */
CODA_API size_t coda_model_constant_bytes(const coda_model *model);

/* --- session ------------------------------------------------------------------------------------------------------ */

/* Makes a session; `options` may be NULL. It starts threads - 1 workers: the thread that runs it is the other one. */
CODA_API coda_code coda_session_create(coda_model *model, const coda_session_options *options, coda_session **session,
                                       coda_error *error);

CODA_API void coda_session_free(coda_session *session);

CODA_API int32_t coda_session_threads(const coda_session *session);

/* Begins the sequence of random numbers anew: what later runs draw depends on `seed` and their number alone. */
CODA_API coda_code coda_session_seed(coda_session *session, uint64_t seed, coda_error *error);

/* The outputs' types and dimensions for these inputs, without running: fills dtype, rank, dims and bytes of each
 * output, and leaves data alone. The data of inputs is not read: a dimension that depends on it is -1, and the bytes of
 * such an output are 0. */
CODA_API coda_code coda_session_shapes(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs,
                                       coda_error *error);

/* Runs the model. `inputs` and `outputs` are in the model's order, one for each input and output.
 * An output with data is written there; its `bytes` must suffice, and it may overlap no other tensor. An output whose
 * data is NULL is set to memory of the session, which is valid until the next run or the session's end.
 * dtype, rank, dims and bytes of every output are filled. Where data decides an output's dimensions, only the run
 * itself can tell whether memory that was given suffices: with CODA_ERROR_SHAPE it does not. */
CODA_API coda_code coda_session_run(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs,
                                    coda_error *error);

/* With `on` 1, the run under way ends soon with CODA_ERROR_CANCELLED, as do all that follow until `on` is 0. Any thread
 * may call this at any time in the session's life. A run ends when the kernel calls that have begun return. */
CODA_API coda_code coda_session_cancel(coda_session *session, int32_t on);

/* Bytes of working memory (arena and scratch) that a run with these inputs needs; where data decides sizes, those of
 * its first phase. The data of inputs is not read. */
CODA_API coda_code coda_session_memory_bytes(coda_session *session, const coda_tensor *inputs, size_t *bytes,
                                             coda_error *error);

/* Has the runs that follow work in memory of the caller's, aligned to 64 bytes, instead of the allocator's. A run that
 * needs more ends with CODA_ERROR_MEMORY. Between runs the memory may be used for other things. NULL: the allocator's.
 */
CODA_API coda_code coda_session_set_memory(coda_session *session, void *memory, size_t bytes, coda_error *error);

/* Threads of the caller's: calls work(argument, i) once for each i in [0, count), on any threads and in any order, and
 * returns when all these calls have. */
typedef void (*coda_parallel)(void *context, void (*work)(void *argument, size_t index), size_t count, void *argument);

/* coda_session_run on threads that `parallel`, handed `context`, lends for as long as the run lasts; the session was
 * made with `lent`. Any number of threads serves, in each run another one. */
CODA_API coda_code coda_session_run_on(coda_session *session, const coda_tensor *inputs, coda_tensor *outputs,
                                       coda_parallel parallel, void *context, coda_error *error);

/* Has the runs that follow call `timer` after each step, in the thread that runs the session, with `context`. NULL, as
 * at first: no step is timed. The timer must not use the session. */
CODA_API coda_code coda_session_set_timer(coda_session *session, coda_step_timer timer, void *context,
                                          coda_error *error);

/* The cost of each step of the last run, in order, into costs[0, capacity); returns how many there are: 0 before the
 * first run. */
CODA_API size_t coda_session_costs(const coda_session *session, coda_step_cost *costs, size_t capacity);

/* Size `index` that data decided in the last run, and its name in the model's shapes ("frames"); returns 0, or -1 when
 * there is none. */
CODA_API int coda_session_data_size(const coda_session *session, size_t index, const char **name, int64_t *value);

/* Bytes of working memory that the last run needed: activations packed by liveness. */
CODA_API size_t coda_session_arena_bytes(const coda_session *session);

#ifdef __cplusplus
}
#endif
#endif
