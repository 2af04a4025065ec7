/* Functions of the other libraries that return something. The build takes for each library those
   that carry its prefix; functions without code here return success, or an error (standins.py). */
#include <string.h>

#include "device.h"

#ifdef LIBRARY_cublas
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }

int cublasGetVersion_v2(void *handle, int *version) {
  *version = CUDA * 10000 + 900;
  return 0;
}
#endif

#ifdef LIBRARY_cublasLt
size_t cublasLtGetVersion(void) { return CUDA * 10000 + 900; }

/* As cublasLtMatmulHeuristicResult_t: there is always one algorithm, and it needs no workspace. */
struct result {
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int wanted, struct result *results,
                                   int *found) {
  memset(results, 0, sizeof *results);
  *found = 1;
  return 0;
}
#endif

#ifdef LIBRARY_cudnn
/* Only what torch asks before it computes; all else is refused with CUDNN_STATUS_NOT_SUPPORTED. */
size_t cudnnGetVersion(void) { return 99900; } /* not older than what torch was built with */

size_t cudnnGetCudartVersion(void) { return CUDA * 1000; }

void cudnnGetLastErrorString(char *to, size_t bytes) {
  static const char TEXT[] = "phantomgpu has no cuDNN; use torch.backends.cudnn.enabled = False";
  if (bytes) {
    strncpy(to, TEXT, bytes - 1);
    to[bytes - 1] = 0;
  }
}
#endif

#ifdef LIBRARY_cusparse
int cusparseSpMM_bufferSize(void *a, int b, int c, void *d, void *e, void *f, void *g, void *h,
                            int i, int j, size_t *bytes) {
  *bytes = 0;
  phantom_assumed |= 4;
  return 0;
}
#endif

#ifdef LIBRARY_cufft
int cufftCreate(int *plan) {
  *plan = 1;
  return 0;
}

int cufftXtMakePlanMany(int plan, int rank, void *n, void *a, long long b, long long c, int d,
                        void *e, long long f, long long g, int h, long long batch, size_t *bytes,
                        int type) {
  *bytes = 0;
  phantom_assumed |= 2;
  return 0;
}
#endif

#ifdef LIBRARY_nvrtc
int nvrtcVersion(int *major, int *minor) {
  *major = CUDA;
  *minor = 0;
  return 0;
}

int nvrtcGetPTXSize(void *program, size_t *bytes) { return *bytes = 1, 0; }

int nvrtcGetPTX(void *program, char *to) { return *to = 0; }

int nvrtcGetLoweredName(void *program, const char *name, const char **to) {
  *to = "kernel";
  return 0;
}
#endif

#ifdef LIBRARY_nvml
/* For the message of torch.OutOfMemoryError: no other program uses the device. */
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  return *count = 0;
}

/* Total, free, used: of the device that this thread uses. */
int nvmlDeviceGetMemoryInfo(void *device, size_t *to) {
  cuMemGetInfo_v2(to + 1, to);
  to[2] = to[0] - to[1];
  return 0;
}

/* 3: not supported. Without it, torch shares memory between processes as files. */
int nvmlDeviceGetGpuFabricInfoV(void *device, void *information) { return 3; }
#endif
