/* The native part of Embed.java, for Java and Kotlin, on Android too: libcoda_embed.so, linked with the runtime. */
#include <jni.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "coda.h"

enum { MAX_TENSORS = 8 };

static jfloatArray fail(JNIEnv *env, const char *message) {
  jclass type = (*env)->FindClass(env, "java/lang/IllegalStateException");
  if (type)
    (*env)->ThrowNew(env, type, message);
  return NULL;
}

static bool is_encoder(const coda_model *model) {
  const coda_tensor_info *first = coda_model_output(model, 0);
  return coda_model_input_count(model) <= MAX_TENSORS && coda_model_output_count(model) <= MAX_TENSORS && first &&
         first->dtype == CODA_FLOAT32 && first->rank == 3;
}

static jfloatArray mean(JNIEnv *env, const coda_tensor *hidden) {
  const int64_t tokens = hidden->dims[1], width = hidden->dims[2];
  const float *data = hidden->data;
  float *sums = calloc((size_t)width + 1, sizeof *sums);
  jfloatArray result = sums ? (*env)->NewFloatArray(env, (jsize)width) : NULL;
  for (int64_t i = 0; i < tokens && result; i++)
    for (int64_t k = 0; k < width; k++)
      sums[k] += data[i * width + k] / (float)tokens;
  if (result)
    (*env)->SetFloatArrayRegion(env, result, 0, (jsize)width, sums);
  free(sums);
  return result;
}

JNIEXPORT jfloatArray JNICALL Java_Embed_embed(JNIEnv *env, jclass self, jstring path, jlongArray tokens) {
  coda_tensor inputs[MAX_TENSORS] = {{0}}, outputs[MAX_TENSORS] = {{0}};
  coda_error error = {CODA_ERROR_MEMORY, "no memory for the tokens"};
  coda_model *model = NULL;
  coda_session *session = NULL;
  jfloatArray result = NULL;
  (void)self;
  const jsize count = (*env)->GetArrayLength(env, tokens);
  int64_t *memory = calloc(3 * (size_t)count + 1, sizeof *memory);
  const char *name = (*env)->GetStringUTFChars(env, path, NULL);
  if (memory && name && coda_model_open(name, NULL, &model, &error) == CODA_OK && !is_encoder(model))
    strcpy(error.message, "the bundle is no encoder of sentences");
  else if (model && coda_session_create(model, NULL, &session, &error) == CODA_OK) {
    int64_t *const ids = memory, *const ones = memory + count, *const zeros = memory + 2 * count;
    (*env)->GetLongArrayRegion(env, tokens, 0, count, (jlong *)ids);
    for (jsize i = 0; i < count; i++)
      ones[i] = 1;
    for (size_t i = 0; i < coda_model_input_count(model); i++) {
      const char *input = coda_model_input(model, i)->name;
      int64_t *data = strstr(input, "mask") ? ones : strstr(input, "type") ? zeros : ids;
      inputs[i] = (coda_tensor){data, (size_t)count * sizeof *data, CODA_INT64, 2, {1, count}};
    }
    if (coda_session_run(session, inputs, outputs, &error) == CODA_OK)
      result = mean(env, &outputs[0]);
  }
  if (name)
    (*env)->ReleaseStringUTFChars(env, path, name);
  coda_session_free(session);
  coda_model_free(model);
  free(memory);
  return result ? result : fail(env, error.message);
}
