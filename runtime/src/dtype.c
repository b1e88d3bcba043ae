/* Element types: numbers from ONNX, names from numpy. */
#include "coda.h"

static const struct {
  const char *name;
  size_t size;
} TYPES[] = {
    [CODA_FLOAT32] = {"float32", 4},   [CODA_UINT8] = {"uint8", 1},   [CODA_INT8] = {"int8", 1},
    [CODA_UINT16] = {"uint16", 2},     [CODA_INT16] = {"int16", 2},   [CODA_INT32] = {"int32", 4},
    [CODA_INT64] = {"int64", 8},       [CODA_BOOL] = {"bool", 1},     [CODA_FLOAT16] = {"float16", 2},
    [CODA_FLOAT64] = {"float64", 8},   [CODA_UINT32] = {"uint32", 4}, [CODA_UINT64] = {"uint64", 8},
    [CODA_BFLOAT16] = {"bfloat16", 2},
};

static size_t known(int32_t dtype) {
  return dtype > 0 && (size_t)dtype < sizeof TYPES / sizeof *TYPES && TYPES[dtype].name ? (size_t)dtype : 0;
}

size_t coda_dtype_size(int32_t dtype) { return TYPES[known(dtype)].size; }

const char *coda_dtype_name(int32_t dtype) { return known(dtype) ? TYPES[dtype].name : "unknown"; }
