/* libcublas: matrix products are launched and do nothing. Handles are never read. */
static unsigned long last = 1 << 21;

int cublasCreate_v2(void **handle) {
  *handle = (void *)(last += 64);
  return 0;
}

int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }

int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
