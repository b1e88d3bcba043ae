/* The part of onnxruntime's C ABI that the execution provider and the operators of regions use, declared anew.
   Functions keep their place in their table for good, so a slot's number is all there is to know of it; structures that
   we fill in are those of API 23, for operators those of API 18, which later releases take as such. */
#ifndef CODA_EP_API_H
#define CODA_EP_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { OP_API_USED = 18 };
enum { EP_API_USED = 23, EP_API_CONTROL = 18 }; /* API_CONTROL: has what is needed to say that it is too old */
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_NO_SUCHFILE = 3, ORT_INVALID_GRAPH = 10, ORT_EP_FAIL = 11 };
enum { ORT_LOG_VERBOSE, ORT_LOG_INFO, ORT_LOG_WARNING, ORT_LOG_ERROR };
enum { ORT_DEVICE_CPU = 0 };
enum { ORT_TYPE_UNDEFINED = 0, ORT_MEMORY_DEFAULT = 0, ORT_VARIADIC = 2 }; /* of an operator's inputs and outputs */
enum { ORT_ATTRIBUTE_INT = 1, ORT_ATTRIBUTE_STRING = 5 };

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtCustomOp OrtCustomOp;
typedef struct OrtShapeInferContext OrtShapeInferContext;
typedef struct OrtTypeInfo OrtTypeInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtLogger OrtLogger;
typedef struct OrtGraph OrtGraph;
typedef struct OrtNode OrtNode;
typedef struct OrtValueInfo OrtValueInfo;
typedef struct OrtExternalInitializerInfo OrtExternalInitializerInfo;
typedef struct OrtOpAttr OrtOpAttr;
typedef struct OrtHardwareDevice OrtHardwareDevice;
typedef struct OrtEpDevice OrtEpDevice;
typedef struct OrtKeyValuePairs OrtKeyValuePairs;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtDataTransferImpl OrtDataTransferImpl;
typedef struct OrtEpGraphSupportInfo OrtEpGraphSupportInfo;
typedef struct OrtNodeComputeContext OrtNodeComputeContext;
typedef struct OrtEp OrtEp;
typedef struct OrtEpFactory OrtEpFactory;
typedef struct OrtNodeComputeInfo OrtNodeComputeInfo;
typedef struct OrtNodeFusionOptions OrtNodeFusionOptions;

#define UNUSED(first, last) void *unused_##first[(last) - (first) + 1];

typedef struct {
  OrtStatus *(*CreateEpDevice)(OrtEpFactory *, const OrtHardwareDevice *, const OrtKeyValuePairs *metadata,
                               const OrtKeyValuePairs *options, OrtEpDevice **);
  UNUSED(1, 1)
  OrtStatus *(*EpGraphSupportInfo_AddNodesToFuse)(OrtEpGraphSupportInfo *, const OrtNode *const *, size_t count,
                                                  const OrtNodeFusionOptions *);
} OrtEpApi;

typedef struct {
  UNUSED(0, 5)
  OrtStatus *(*CreateNode)(const char *op_type, const char *domain, const char *name, const char *const *inputs,
                           size_t input_count, const char *const *outputs, size_t output_count, OrtOpAttr **attributes,
                           size_t attribute_count, OrtNode **);
} OrtModelEditorApi;

typedef struct {
  OrtStatus *(*CreateStatus)(int code, const char *message);
  UNUSED(1, 1)
  const char *(*GetErrorMessage)(const OrtStatus *);
  UNUSED(3, 25)
  OrtStatus *(*CreateCustomOpDomain)(const char *domain, OrtCustomOpDomain **);
  OrtStatus *(*CustomOpDomain_Add)(OrtCustomOpDomain *, const OrtCustomOp *);
  OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *, OrtCustomOpDomain *);
  UNUSED(29, 50)
  OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
  UNUSED(52, 54)
  OrtStatus *(*CastTypeInfoToTensorInfo)(const OrtTypeInfo *, const OrtTensorTypeAndShapeInfo **);
  UNUSED(56, 59)
  OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, int *);
  OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *, size_t *);
  OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t);
  UNUSED(63, 64)
  OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorTypeAndShapeInfo **);
  UNUSED(66, 87)
  OrtStatus *(*KernelContext_GetInputCount)(const OrtKernelContext *, size_t *);
  OrtStatus *(*KernelContext_GetOutputCount)(const OrtKernelContext *, size_t *);
  OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *, size_t, const OrtValue **);
  OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *, size_t, const int64_t *dims, size_t rank, OrtValue **);
  UNUSED(92, 92)
  void (*ReleaseStatus)(OrtStatus *);
  UNUSED(94, 98)
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *);
  UNUSED(100, 100)
  void (*ReleaseCustomOpDomain)(OrtCustomOpDomain *);
  UNUSED(102, 210)
  OrtStatus *(*CreateOpAttr)(const char *name, const void *data, int length, int type, OrtOpAttr **);
  void (*ReleaseOpAttr)(OrtOpAttr *);
  UNUSED(213, 236)
  OrtStatus *(*HasSessionConfigEntry)(const OrtSessionOptions *, const char *key, int *);
  OrtStatus *(*GetSessionConfigEntry)(const OrtSessionOptions *, const char *key, char *value, size_t *size);
  UNUSED(239, 243)
  OrtStatus *(*KernelInfo_GetNodeName)(const OrtKernelInfo *, char *, size_t *);
  UNUSED(245, 246)
  OrtStatus *(*Logger_LogMessage)(const OrtLogger *, int severity, const char *message, const char *file, int line,
                                  const char *function);
  UNUSED(248, 248)
  OrtStatus *(*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo *, size_t, int *constant, const OrtValue **);
  UNUSED(250, 271)
  OrtStatus *(*ReadOpAttr)(const OrtOpAttr *, int type, void *data, size_t size, size_t *needed);
  UNUSED(273, 273)
  OrtStatus *(*KernelContext_ParallelFor)(const OrtKernelContext *, void (*)(void *, size_t), size_t total,
                                          size_t batches, void *);
  UNUSED(275, 288)
  OrtStatus *(*GetValueInfoName)(const OrtValueInfo *, const char **);
  OrtStatus *(*GetValueInfoTypeInfo)(const OrtValueInfo *, const OrtTypeInfo **);
  const OrtModelEditorApi *(*GetModelEditorApi)(void);
  UNUSED(292, 306)
  int (*HardwareDevice_Type)(const OrtHardwareDevice *);
  UNUSED(308, 316)
  const OrtEpApi *(*GetEpApi)(void);
  OrtStatus *(*GetTensorSizeInBytes)(const OrtValue *, size_t *);
  UNUSED(319, 322)
  OrtStatus *(*ValueInfo_GetValueProducer)(const OrtValueInfo *, const OrtNode **, size_t *output);
  OrtStatus *(*ValueInfo_GetValueNumConsumers)(const OrtValueInfo *, size_t *);
  OrtStatus *(*ValueInfo_GetValueConsumers)(const OrtValueInfo *, const OrtNode **, int64_t *inputs, size_t count);
  OrtStatus *(*ValueInfo_GetInitializerValue)(const OrtValueInfo *, const OrtValue **);
  OrtStatus *(*ValueInfo_GetExternalInitializerInfo)(const OrtValueInfo *, OrtExternalInitializerInfo **);
  UNUSED(328, 329)
  OrtStatus *(*ValueInfo_IsGraphOutput)(const OrtValueInfo *, bool *);
  OrtStatus *(*ValueInfo_IsConstantInitializer)(const OrtValueInfo *, bool *);
  UNUSED(332, 333)
  OrtStatus *(*Graph_GetModelPath)(const OrtGraph *, const char **);
  UNUSED(335, 339)
  OrtStatus *(*Graph_GetNumOutputs)(const OrtGraph *, size_t *);
  OrtStatus *(*Graph_GetOutputs)(const OrtGraph *, const OrtValueInfo **, size_t count);
  UNUSED(342, 343)
  OrtStatus *(*Graph_GetNumNodes)(const OrtGraph *, size_t *);
  OrtStatus *(*Graph_GetNodes)(const OrtGraph *, const OrtNode **, size_t count);
  OrtStatus *(*Graph_GetParentNode)(const OrtGraph *, const OrtNode **);
  UNUSED(347, 347)
  OrtStatus *(*Node_GetId)(const OrtNode *, size_t *);
  OrtStatus *(*Node_GetName)(const OrtNode *, const char **);
  OrtStatus *(*Node_GetOperatorType)(const OrtNode *, const char **);
  OrtStatus *(*Node_GetDomain)(const OrtNode *, const char **);
  UNUSED(352, 352)
  OrtStatus *(*Node_GetNumInputs)(const OrtNode *, size_t *);
  OrtStatus *(*Node_GetInputs)(const OrtNode *, const OrtValueInfo **, size_t count);
  OrtStatus *(*Node_GetNumOutputs)(const OrtNode *, size_t *);
  OrtStatus *(*Node_GetOutputs)(const OrtNode *, const OrtValueInfo **, size_t count);
  OrtStatus *(*Node_GetNumImplicitInputs)(const OrtNode *, size_t *);
  OrtStatus *(*Node_GetImplicitInputs)(const OrtNode *, const OrtValueInfo **, size_t count);
  UNUSED(359, 360)
  OrtStatus *(*Node_GetAttributeByName)(const OrtNode *, const char *name, const OrtOpAttr **);
  UNUSED(362, 368)
  void (*ReleaseExternalInitializerInfo)(OrtExternalInitializerInfo *);
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
  void *unused[4]; /* GetMayInplace to ReleaseAliasMap */
};

struct OrtNodeFusionOptions {
  uint32_t ort_version_supported;
  bool drop_constant_initializers;
};

struct OrtNodeComputeInfo {
  uint32_t ort_version_supported;
  OrtStatus *(*CreateState)(OrtNodeComputeInfo *, OrtNodeComputeContext *, void **state);
  OrtStatus *(*Compute)(OrtNodeComputeInfo *, void *state, OrtKernelContext *);
  void (*ReleaseState)(OrtNodeComputeInfo *, void *state);
};

struct OrtEp {
  uint32_t ort_version_supported;
  const char *(*GetName)(const OrtEp *);
  OrtStatus *(*GetCapability)(OrtEp *, const OrtGraph *, OrtEpGraphSupportInfo *);
  OrtStatus *(*Compile)(OrtEp *, const OrtGraph **, const OrtNode **fused, size_t count, OrtNodeComputeInfo **,
                        OrtNode **contexts);
  void (*ReleaseNodeComputeInfos)(OrtEp *, OrtNodeComputeInfo **, size_t count);
  void *unused[8]; /* GetPreferredDataLayout to GetCompiledModelCompatibilityInfo: NULL for the default */
};

struct OrtEpFactory {
  uint32_t ort_version_supported;
  const char *(*GetName)(const OrtEpFactory *);
  const char *(*GetVendor)(const OrtEpFactory *);
  OrtStatus *(*GetSupportedDevices)(OrtEpFactory *, const OrtHardwareDevice *const *, size_t count, OrtEpDevice **,
                                    size_t capacity, size_t *result);
  OrtStatus *(*CreateEp)(OrtEpFactory *, const OrtHardwareDevice *const *, const OrtKeyValuePairs *const *metadata,
                         size_t count, const OrtSessionOptions *, const OrtLogger *, OrtEp **);
  void (*ReleaseEp)(OrtEpFactory *, OrtEp *);
  uint32_t (*GetVendorId)(const OrtEpFactory *);
  const char *(*GetVersion)(const OrtEpFactory *);
  void *unused; /* ValidateCompiledModelCompatibilityInfo */
  OrtStatus *(*CreateAllocator)(OrtEpFactory *, const OrtMemoryInfo *, const OrtKeyValuePairs *, OrtAllocator **);
  void (*ReleaseAllocator)(OrtEpFactory *, OrtAllocator *);
  OrtStatus *(*CreateDataTransfer)(OrtEpFactory *, OrtDataTransferImpl **);
  bool (*IsStreamAware)(const OrtEpFactory *);
  void *unused_stream; /* CreateSyncStreamForDevice */
};

#endif
