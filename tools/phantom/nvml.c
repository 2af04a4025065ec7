/* libnvidia-ml.so.1: torch counts devices with it, and asks whether devices are linked. */
#include "device.h"

int nvmlInit(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = phantom_devices();
  return 0;
}

/* For the message of torch.OutOfMemoryError: no other program uses the device. */
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  return *count = 0;
}

/* 3: not supported. Without it, torch shares memory between processes as files. */
int nvmlDeviceGetGpuFabricInfoV(void *device, void *information) { return 3; }
