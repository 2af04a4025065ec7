/* libcudart: devices, memory, streams, copies. Kernels are launched and do nothing; what is read
   back from a device is zero. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

#if CUDART_VERSION < 13000
#error "headers of CUDA 13 or later are needed; set CUDA_HOME"
#endif

static _Thread_local cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorNoDevice) return "no CUDA-capable device is detected";
  return error ? "error of the phantom runtime" : "no error";
}

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorPhantom";
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
  *count = phantom_devices();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = phantom_current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= phantom_devices()) return fail(cudaErrorInvalidDevice);
  phantom_current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  *value = phantom_attribute(which);
  return cudaSuccess;
}

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *facts, int device) {
  if (device < 0 || device >= phantom_devices()) return fail(cudaErrorInvalidDevice);
  memset(facts, 0, sizeof *facts);
  strcpy(facts->name, phantom_kind()->name);
  memset(facts->uuid.bytes, device + 1, sizeof facts->uuid.bytes);
  facts->totalGlobalMem = phantom_memory();
  facts->totalConstMem = 65536;
  facts->pciBusID = device + 1;
  facts->memPitch = 2147483647;
  facts->textureAlignment = 512;
  facts->texturePitchAlignment = 32;
  facts->unifiedAddressing = 1;
  facts->canMapHostMemory = 1;
  facts->streamPrioritiesSupported = 1;
  facts->memoryPoolsSupported = 1;
  facts->hostRegisterSupported = 1;
  facts->asyncEngineCount = 3;
  facts->major = phantom_attribute(cudaDevAttrComputeCapabilityMajor);
  facts->minor = phantom_attribute(cudaDevAttrComputeCapabilityMinor);
  facts->multiProcessorCount = phantom_attribute(cudaDevAttrMultiProcessorCount);
  facts->warpSize = phantom_attribute(cudaDevAttrWarpSize);
  facts->maxThreadsPerBlock = phantom_attribute(cudaDevAttrMaxThreadsPerBlock);
  facts->maxThreadsPerMultiProcessor = phantom_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  facts->maxBlocksPerMultiProcessor = phantom_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  facts->sharedMemPerBlock = phantom_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  facts->sharedMemPerBlockOptin = phantom_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts->sharedMemPerMultiprocessor =
      phantom_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  facts->reservedSharedMemPerBlock = phantom_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  facts->regsPerBlock = phantom_attribute(cudaDevAttrMaxRegistersPerBlock);
  facts->regsPerMultiprocessor = phantom_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  facts->l2CacheSize = phantom_attribute(cudaDevAttrL2CacheSize);
  facts->maxGridSize[0] = phantom_attribute(cudaDevAttrMaxGridDimX);
  facts->maxGridSize[1] = phantom_attribute(cudaDevAttrMaxGridDimY);
  facts->maxGridSize[2] = phantom_attribute(cudaDevAttrMaxGridDimZ);
  facts->maxThreadsDim[0] = phantom_attribute(cudaDevAttrMaxBlockDimX);
  facts->maxThreadsDim[1] = phantom_attribute(cudaDevAttrMaxBlockDimY);
  facts->maxThreadsDim[2] = phantom_attribute(cudaDevAttrMaxBlockDimZ);
  facts->concurrentKernels = 1;
  facts->cooperativeLaunch = 1;
  facts->clusterLaunch = facts->major >= 9;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = driver ? dlsym(driver, name) : NULL;
  }
  if (result)
    *result =
        *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : fail(cudaErrorNotSupported);
}

/* Memory */

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  int device = phantom_current_device;
  bytes = (bytes + PHANTOM_PAGE - 1) / PHANTOM_PAGE * PHANTOM_PAGE;
  *pointer = NULL;
  if (!bytes) return cudaSuccess;
  if (!phantom_take(device, bytes)) return fail(cudaErrorMemoryAllocation);
  *pointer = (void *)phantom_address(device, bytes);
  if (*pointer) return cudaSuccess;
  phantom_give(device, bytes);
  return fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer) {
  if (!pointer) return cudaSuccess;
  size_t bytes = phantom_return((size_t)pointer);
  if (!bytes) return fail(cudaErrorInvalidValue);
  phantom_give(phantom_owner(pointer), bytes);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
  return cudaMalloc(pointer, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = phantom_free_memory(phantom_current_device);
  *total_bytes = phantom_memory();
  return cudaSuccess;
}

/* Pinned memory of the host, newest first. */
struct pinned {
  char *address;
  size_t bytes;
  struct pinned *next;
};
static struct pinned *pinned;
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *facts, const void *pointer) {
  int owner = phantom_owner(pointer);
  memset(facts, 0, sizeof *facts);
  facts->type = owner < 0 ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
  facts->device = owner < 0 ? 0 : owner;
  facts->devicePointer = owner < 0 ? NULL : (void *)pointer;
  pthread_mutex_lock(&pinned_lock);
  for (struct pinned *one = pinned; owner < 0 && one; one = one->next)
    if ((size_t)((char *)pointer - one->address) < one->bytes) {
      facts->type = cudaMemoryTypeHost;
      facts->devicePointer = facts->hostPointer = (void *)pointer;
      break;
    }
  pthread_mutex_unlock(&pinned_lock);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  struct pinned *one = malloc(sizeof *one);
  *pointer = calloc(1, bytes);
  if (!*pointer || !one) return fail(cudaErrorMemoryAllocation);
  pthread_mutex_lock(&pinned_lock);
  *one = (struct pinned){*pointer, bytes, pinned};
  pinned = one;
  pthread_mutex_unlock(&pinned_lock);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t cudaFreeHost(void *pointer) {
  pthread_mutex_lock(&pinned_lock);
  for (struct pinned **link = &pinned; *link; link = &(*link)->next)
    if ((*link)->address == pointer) {
      struct pinned *one = *link;
      *link = one->next;
      free(one);
      break;
    }
  pthread_mutex_unlock(&pinned_lock);
  free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  if (phantom_owner(to) >= 0) return cudaSuccess;
  if (phantom_owner(from) >= 0)
    memset(to, 0, bytes);
  else
    memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    cudaMemcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
  return cudaSuccess;
}

/* Streams and events: handles that are never read */

static void *handle(void) {
  static size_t last = 4096;
  return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = handle();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  *stream = handle();
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = handle();
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5; /* as on all devices since Pascal */
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = handle();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = handle();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 0;
  return cudaSuccess;
}

/* Kernels */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *facts, const void *function) {
  memset(facts, 0, sizeof *facts);
  facts->maxThreadsPerBlock = 1024;
  facts->numRegs = 32; /* so few that registers never limit how many blocks run at a time */
  facts->binaryVersion = facts->ptxVersion = phantom_kind()->code;
  facts->maxDynamicSharedSizeBytes = phantom_kind()->shared_per_block_optin;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int threads, size_t shared) {
  const struct phantom_kind *kind = phantom_kind();
  *blocks = threads > 0 ? kind->threads_per_processor / threads : 0;
  if (shared && *blocks > kind->shared_per_processor / (long)shared)
    *blocks = kind->shared_per_processor / (long)shared;
  if (*blocks > kind->blocks_per_processor) *blocks = kind->blocks_per_processor;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *function,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                           const cudaLaunchConfig_t *config) {
  *clusters = 16;
  return cudaSuccess;
}

/* The next functions are called by code that nvcc writes. */

void **__cudaRegisterFatBinary(void *binary) {
  static void *registered;
  return &registered;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = (dim3){1, 1, 1};
  *shared = 0;
  *(void **)stream = NULL;
  return cudaSuccess;
}
