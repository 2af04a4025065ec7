/* libcublasLt: there is always one algorithm, and it needs no workspace. */
#include <string.h>

static unsigned long last = 1 << 20;

int cublasLtCreate(void **handle) {
  *handle = (void *)(last += 64);
  return 0;
}

/* As cublasLtMatmulHeuristicResult_t in cublasLt.h, which the small packages of headers lack. */
struct result {
  unsigned long long algorithm[8];
  unsigned long workspace;
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
