/* The part of onnxruntime's C ABI that the operators use, declared anew. Functions keep their place in OrtApi for good,
   so a slot's number is all there is to know of it; tests/test_onnxruntime.py checks the numbers. API 18
   (onnxruntime 1.18) has everything here. */
#ifndef CODA_ORT_API_H
#define CODA_ORT_API_H

#include <stddef.h>
#include <stdint.h>

enum { ORT_API_USED = 18 };
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 }; /* OrtErrorCode */
enum { ORT_ARENA_ALLOCATOR = 1, ORT_MEMORY_DEFAULT = 0 }; /* OrtAllocatorType, OrtMemType */
enum { ORT_REQUIRED = 0 }; /* OrtCustomOpInputOutputCharacteristic */

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtShapeInferContext OrtShapeInferContext;
typedef struct OrtCustomOp OrtCustomOp;

/* Its first members. */
typedef struct OrtAllocator {
  uint32_t version;
  void *(*Alloc)(struct OrtAllocator *, size_t);
  void (*Free)(struct OrtAllocator *, void *);
} OrtAllocator;

#define UNUSED(first, last) void *unused_##first[(last) - (first) + 1];

typedef struct {
  OrtStatus *(*CreateStatus)(int code, const char *message);
  UNUSED(1, 25)
  OrtStatus *(*CreateCustomOpDomain)(const char *domain, OrtCustomOpDomain **);
  OrtStatus *(*CustomOpDomain_Add)(OrtCustomOpDomain *, const OrtCustomOp *);
  OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *, OrtCustomOpDomain *);
  UNUSED(29, 50)
  OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
  UNUSED(52, 56)
  OrtStatus *(*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo **);
  OrtStatus *(*SetTensorElementType)(OrtTensorTypeAndShapeInfo *, int);
  OrtStatus *(*SetDimensions)(OrtTensorTypeAndShapeInfo *, const int64_t *, size_t);
  OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, int *);
  OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *, size_t *);
  OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t);
  OrtStatus *(*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo *, const char **, size_t);
  UNUSED(64, 64)
  OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorTypeAndShapeInfo **);
  UNUSED(66, 67)
  OrtStatus *(*CreateMemoryInfo)(const char *name, int allocator, int device, int memory, OrtMemoryInfo **);
  UNUSED(69, 86)
  OrtStatus *(*KernelInfoGetAttribute_string)(const OrtKernelInfo *, const char *name, char *, size_t *);
  OrtStatus *(*KernelContext_GetInputCount)(const OrtKernelContext *, size_t *);
  UNUSED(89, 89)
  OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *, size_t, const OrtValue **);
  OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *, size_t, const int64_t *dims, size_t rank, OrtValue **);
  UNUSED(92, 92)
  void (*ReleaseStatus)(OrtStatus *);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo *);
  UNUSED(95, 98)
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *);
  UNUSED(100, 100)
  void (*ReleaseCustomOpDomain)(OrtCustomOpDomain *);
  UNUSED(102, 131)
  void (*ReleaseAllocator)(OrtAllocator *);
  UNUSED(133, 243)
  OrtStatus *(*KernelInfo_GetNodeName)(const OrtKernelInfo *, char *, size_t *);
  UNUSED(245, 248)
  OrtStatus *(*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo *, size_t, int *constant, const OrtValue **);
  UNUSED(250, 252)
  OrtStatus *(*KernelContext_GetAllocator)(const OrtKernelContext *, const OrtMemoryInfo *, OrtAllocator **);
  UNUSED(254, 266)
  OrtStatus *(*ShapeInferContext_GetInputCount)(const OrtShapeInferContext *, size_t *);
  OrtStatus *(*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext *, size_t, OrtTensorTypeAndShapeInfo **);
  UNUSED(269, 269)
  OrtStatus *(*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext *, size_t,
                                                     const OrtTensorTypeAndShapeInfo *);
  OrtStatus *(*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo *, const char **, size_t);
  UNUSED(272, 273)
  OrtStatus *(*KernelContext_ParallelFor)(const OrtKernelContext *, void (*)(void *, size_t), size_t total,
                                          size_t batches, void *);
} OrtApi;

typedef struct {
  const OrtApi *(*GetApi)(uint32_t);
  const char *(*GetVersionString)(void);
} OrtApiBase;

struct OrtCustomOp {
  uint32_t version;
  void *(*CreateKernel)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *);
  const char *(*GetName)(const OrtCustomOp *);
  const char *(*GetExecutionProviderType)(const OrtCustomOp *);
  int (*GetInputType)(const OrtCustomOp *, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp *);
  int (*GetOutputType)(const OrtCustomOp *, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp *);
  void (*KernelCompute)(void *, OrtKernelContext *);
  void (*KernelDestroy)(void *);
  int (*GetInputCharacteristic)(const OrtCustomOp *, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp *, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp *, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp *);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp *);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp *);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp *);
  OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **);
  OrtStatus *(*KernelComputeV2)(void *, OrtKernelContext *);
  OrtStatus *(*InferOutputShapeFn)(const OrtCustomOp *, OrtShapeInferContext *);
  int (*GetStartVersion)(const OrtCustomOp *);
  int (*GetEndVersion)(const OrtCustomOp *);
  size_t (*GetMayInplace)(int **, int **);
  void (*ReleaseMayInplace)(int *, int *);
  size_t (*GetAliasMap)(int **, int **);
  void (*ReleaseAliasMap)(int *, int *);
};

#endif
