/* Functions of the other libraries with code. The build takes for each library those that carry its
   prefix; the others give an answer (answers.txt), success or an error (standins.py). */
#include <string.h>

#include "device.h"

#ifdef LIBRARY_cublasLt
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
void cudnnGetLastErrorString(char *to, size_t bytes) {
  static const char TEXT[] = "phantomgpu has no cuDNN; use torch.backends.cudnn.enabled = False";
  if (bytes) {
    strncpy(to, TEXT, bytes - 1);
    to[bytes - 1] = 0;
  }
}
#endif

#ifdef LIBRARY_nvml
/* Total, free, used: of the device that this thread uses. */
int nvmlDeviceGetMemoryInfo(void *device, size_t *to) {
  cuMemGetInfo_v2(to + 1, to);
  to[2] = to[0] - to[1];
  return 0;
}

#endif
