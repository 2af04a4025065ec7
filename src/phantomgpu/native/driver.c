/* libcuda.so.1: what torch, Triton and extensions ask of the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "device.h"

typedef uint64_t address;

/* Virtual memory, for expandable segments. A handle of physical memory is its size, a whole number
   of pages, and its device in the lowest 4 bits. */
int cuMemCreate(size_t *handle, size_t bytes, const int *property, uint64_t flags) {
  int device = property[3]; /* type, kinds of handles, kind of place, number of the device */
  if (!bytes || bytes % PAGE) return INVALID_VALUE;
  if (!phantom_take(device, bytes)) return OUT_OF_MEMORY;
  *handle = bytes | device;
  return OK;
}

int cuMemRelease(size_t handle) {
  phantom_give(handle % MOST_DEVICES, handle / MOST_DEVICES * MOST_DEVICES);
  return OK;
}

int cuMemAddressReserve(address *first, size_t bytes, size_t alignment, address near,
                        uint64_t flags) {
  *first = phantom_reserve(current_device, bytes);
  return *first ? OK : OUT_OF_MEMORY;
}

int cuMemAddressFree(address first, size_t bytes) {
  return phantom_return(first) ? OK : INVALID_VALUE;
}

int cuMemMap(address first, size_t bytes, size_t offset, size_t handle, uint64_t flags) {
  return phantom_owner((void *)first) < 0 ? INVALID_VALUE : OK;
}

int cuMemUnmap(address first, size_t bytes) {
  phantom_set((void *)first, 0, 1, bytes);
  return OK;
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *property, int option) {
  *bytes = PAGE;
  return OK;
}

int cuMemGetAddressRange_v2(address *first, size_t *bytes, address inside) {
  return phantom_block(inside, first, bytes);
}

/* Memory */
int cuMemAlloc_v2(address *pointer, size_t bytes) {
  return phantom_malloc((void **)pointer, bytes, current_device);
}

int cuMemFree_v2(address pointer) { return phantom_free((void *)pointer); }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = facts.memory - phantom_used(current_device);
  *total_bytes = facts.memory;
  return OK;
}

/* Devices and contexts; the context of device n is the address n + 1: never read, and not null. */
int cuInit(unsigned flags) { return facts.devices ? OK : NO_DEVICE; }

int cuDriverGetVersion(int *version) {
  *version = CUDA * 1000;
  return OK;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal < facts.devices ? OK : INVALID_DEVICE;
}

int cuDeviceGetCount(int *count) {
  *count = facts.devices;
  return OK;
}

int cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, "%s", facts.name);
  return OK;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = facts.memory;
  return OK;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
  memset(uuid, device + 1, 16);
  return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = phantom_attribute(attribute);
  return OK;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(size_t)(device + 1);
  return OK;
}

int cuCtxGetCurrent(void **context) {
  *context = (void *)(size_t)(current_device + 1);
  return OK;
}

int cuCtxSetCurrent(void *context) {
  if (context) current_device = (int)(size_t)context - 1;
  return OK;
}

int cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : OK; }

int cuCtxGetDevice(int *device) {
  *device = current_device;
  return OK;
}

int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20;
  return OK;
}

int cuPointerGetAttribute(void *value, int attribute, address pointer) {
  int owner = phantom_owner((void *)pointer);
  if (owner < 0) return INVALID_VALUE;
  switch (attribute) {
    case 1: return cuDevicePrimaryCtxRetain(value, owner);
    case 2: *(unsigned *)value = 2; return OK; /* memory of a device */
    case 3: *(address *)value = pointer; return OK;
    case 8: *(unsigned *)value = 0; return OK; /* managed? */
    case 9: *(int *)value = owner; return OK;
    case 11: return phantom_block(pointer, value, NULL);
    case 12: return phantom_block(pointer, NULL, value);
    default: return NOT_SUPPORTED;
  }
}

/* Kernels, as Triton and NVRTC load them: one handle for all, launched into the void. */
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads per block, registers */
  return OK;
}

int cuLinkComplete(void *state, void **image, size_t *bytes) {
  *image = phantom_handle();
  *bytes = 0;
  return OK;
}

int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  *clusters = 16;
  return OK;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                size_t shared) {
  *blocks = threads > 0 && threads < facts.threads ? facts.threads / threads : 1;
  if (shared && *blocks > facts.shared_per_processor / (long)shared)
    *blocks = facts.shared_per_processor / (long)shared;
  if (*blocks > facts.blocks) *blocks = facts.blocks;
  return OK;
}

int cuGetErrorString(int error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "out of memory"
          : error == NO_DEVICE   ? "no CUDA-capable device is detected"
          : error                ? "phantomgpu does not have this function of the driver"
                                 : "no error";
  return OK;
}

/* A name without its version means the newest one that is here. */
void *phantom_function(const char *name) {
  static void *driver;
  char newest[128];
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) return NULL;
  snprintf(newest, sizeof newest, "%s_v2", name);
  void *found = dlsym(driver, newest);
  return found ? found : dlsym(driver, name);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *status) {
  *function = phantom_function(name);
  if (status) *status = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}

