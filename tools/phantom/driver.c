/* libcuda.so.1: what torch asks of the driver. Expandable segments use its virtual memory. */
#include <cuda.h>

#include "device.h"

/* A handle of physical memory: its device in the lowest 4 bits, its bytes above. The size is a
   whole number of pages, so the bits are free. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *property, unsigned long long flags) {
  int device = property->location.id;
  if (!bytes || bytes % PHANTOM_PAGE) return CUDA_ERROR_INVALID_VALUE;
  if (!phantom_take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = bytes | device;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  phantom_give(handle % PHANTOM_MOST_DEVICES, handle / PHANTOM_MOST_DEVICES * PHANTOM_MOST_DEVICES);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                             CUdeviceptr near, unsigned long long flags) {
  CUdevice device;
  cuCtxGetDevice(&device);
  *address = phantom_address(device, bytes);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  return phantom_return(address) == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return phantom_owner((void *)address) < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return CUDA_SUCCESS; }

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                        size_t count) {
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *property,
                                       CUmemAllocationGranularity_flags option) {
  *bytes = PHANTOM_PAGE;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) {
  return phantom_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < phantom_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = phantom_attribute(attribute);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

/* The context of device n is the address n + 1: never read, and not null. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(size_t)(device + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)(size_t)(phantom_current_device + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) phantom_current_device = (int)(size_t)context - 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = phantom_current_device;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  int owner = phantom_owner((void *)address);
  if (owner < 0) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return cuDevicePrimaryCtxRetain(value, owner);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = owner; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the phantom driver";
  return CUDA_SUCCESS;
}
