/* What onnxruntime calls in the library: the factory of providers, one for each registration. */
#include <stdlib.h>
#include <string.h>

#include "provider.h"

#define EXPORT __attribute__((visibility("default")))

enum { VENDOR_ID = 0xC0DA };

typedef struct {
  OrtEpFactory base;
  host api;
  char *name; /* that it is registered by */
} factory;

static const char *get_name(const OrtEpFactory *self) { return ((const factory *)self)->name; }

static const char *get_vendor(const OrtEpFactory *self) {
  (void)self;
  return "coda-edge";
}

static uint32_t get_vendor_id(const OrtEpFactory *self) {
  (void)self;
  return VENDOR_ID;
}

static const char *get_version(const OrtEpFactory *self) {
  (void)self;
  return CODA_VERSION_TEXT;
}

static OrtStatus *get_devices(OrtEpFactory *self, const OrtHardwareDevice *const *devices, size_t count,
                              OrtEpDevice **result, size_t capacity, size_t *result_count) {
  const host *api = &((factory *)self)->api;
  *result_count = 0;
  for (size_t i = 0; i < count && *result_count < capacity; i++) {
    if (api->ort->HardwareDevice_Type(devices[i]) != ORT_DEVICE_CPU)
      continue;
    TRY(api->ep->CreateEpDevice(self, devices[i], NULL, NULL, &result[*result_count]));
    ++*result_count;
  }
  return NULL;
}

static OrtStatus *create_ep(OrtEpFactory *self, const OrtHardwareDevice *const *devices,
                            const OrtKeyValuePairs *const *metadata, size_t count, const OrtSessionOptions *options,
                            const OrtLogger *logger, OrtEp **result) {
  (void)devices, (void)metadata, (void)count;
  const factory *f = (const factory *)self;
  return provider_create(&f->api, f->name, options, logger, result);
}

static void release_ep(OrtEpFactory *self, OrtEp *ep) {
  (void)self;
  provider_free(ep);
}

/* Memory is the CPU's, as onnxruntime's own. */
static OrtStatus *no_allocator(OrtEpFactory *self, const OrtMemoryInfo *info, const OrtKeyValuePairs *options,
                               OrtAllocator **allocator) {
  (void)self, (void)info, (void)options;
  *allocator = NULL;
  return NULL;
}

static void release_allocator(OrtEpFactory *self, OrtAllocator *allocator) { (void)self, (void)allocator; }

static OrtStatus *no_transfer(OrtEpFactory *self, OrtDataTransferImpl **transfer) {
  (void)self;
  *transfer = NULL;
  return NULL;
}

static bool no_streams(const OrtEpFactory *self) {
  (void)self;
  return false;
}

EXPORT OrtStatus *CreateEpFactories(const char *name, const OrtApiBase *base, const OrtLogger *logger,
                                    OrtEpFactory **factories, size_t capacity, size_t *count) {
  (void)logger;
  *count = 0;
  const OrtApi *ort = base->GetApi(EP_API_USED);
  if (!ort) {
    const OrtApi *old = base->GetApi(EP_API_CONTROL);
    return old ? status_new(old, ORT_FAIL,
                            "coda-edge's execution provider needs onnxruntime 1.23 or later, found %s: update it, or "
                            "use a custom operator library (coda-edge package --form ort)",
                            base->GetVersionString())
               : NULL;
  }
  factory *f = capacity ? calloc(1, sizeof *f) : NULL;
  if (!f || !(f->name = strdup(name))) {
    free(f);
    return status_new(ort, ORT_FAIL, "no memory for an execution provider factory");
  }
  f->api = (host){ort, ort->GetEpApi(), ort->GetModelEditorApi()};
  f->base = (OrtEpFactory){
      .ort_version_supported = EP_API_USED,
      .GetName = get_name,
      .GetVendor = get_vendor,
      .GetSupportedDevices = get_devices,
      .CreateEp = create_ep,
      .ReleaseEp = release_ep,
      .GetVendorId = get_vendor_id,
      .GetVersion = get_version,
      .CreateAllocator = no_allocator,
      .ReleaseAllocator = release_allocator,
      .CreateDataTransfer = no_transfer,
      .IsStreamAware = no_streams,
  };
  factories[0] = &f->base;
  *count = 1;
  return NULL;
}

EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *self) {
  factory *f = (factory *)self;
  if (f)
    free(f->name);
  free(f);
  return NULL;
}
