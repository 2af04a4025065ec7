/* libcudnn: nothing runs. The version decides which attention torch prefers: with 9.10, cuDNN's
   is not the first choice, so torch's own kernels are taken. */
static unsigned long last = 1 << 22;

int cudnnCreate(void **handle) {
  *handle = (void *)(last += 64);
  return 0;
}

unsigned long cudnnGetVersion(void) { return 91000; }
