/* libcudart: devices, memory, copies, streams, graphs. Kernels are launched and do nothing. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "device.h"

static _Thread_local int last_error;

int phantom_fail(int error) {
  if (error) last_error = error;
  return error;
}

int cudaGetLastError(void) {
  int error = last_error;
  last_error = OK;
  return error;
}

int cudaPeekAtLastError(void) { return last_error; }

/* Devices */

static const struct { int attribute, offset, bytes; } PROPERTIES[] = {
#define PROPERTY(number, at13, at12, bytes, value) {number, CUDA == 12 ? at12 : at13, bytes},
#include "properties.txt"
};

int cudaGetDeviceProperties_v2(char *to, int device) {
  if (device < 0 || device >= facts.devices) return phantom_fail(INVALID_DEVICE);
  memset(to, 0, CUDA == 12 ? 1032 : 1008);
  strcpy(to, facts.name);
  memset(to + 256, device + 1, 16); /* uuid */
  *(size_t *)(to + 288) = facts.memory;
  *(int *)(to + (CUDA == 12 ? 584 : 568)) = device + 1; /* PCI bus */
  for (size_t i = 0; i < sizeof PROPERTIES / sizeof *PROPERTIES; i++) {
    size_t value = phantom_attribute(PROPERTIES[i].attribute);
    memcpy(to + PROPERTIES[i].offset, &value, PROPERTIES[i].bytes);
  }
  return OK;
}

/* Memory: what is not here gives an answer only (answers.txt). */

struct pointer_facts {
  int type, device;
  void *on_device, *on_host;
  long reserved[8];
};

int cudaPointerGetAttributes(struct pointer_facts *to, const void *pointer) {
  int owner = phantom_owner(pointer), place = phantom_place(pointer);
  int type = place == PINNED ? 1 : place == MANAGED ? 3 : 0; /* as cudaMemoryType */
  *to = (struct pointer_facts){owner < 0 ? type : 2, owner < 0 ? 0 : owner};
  if (to->type) to->on_device = (void *)pointer;
  if (owner < 0) to->on_host = (void *)pointer;
  return OK;
}

/* Streams and events are handles that are never read. */

void *phantom_graph;
size_t phantom_captures;

/* The device is behind the program until the program waits for it, or as many launches followed as
   the queue holds: about 1,000 (forums.developer.nvidia.com/t/68937). Until then memory that other
   streams use stays taken. A thread that only asks is NCCL's watchdog: it asks every 0.1 seconds,
   which is about as many launches again where a kernel takes 0.1 ms. */
#define QUEUE (1024 * 64)
static size_t waited, recorded[1 << 16];

static size_t *time_of(void *event) { return recorded + (size_t)event / 64 % (1 << 16); }

/* While a program waits for much, NCCL's watchdog asks. */
int cudaDeviceSynchronize(void) {
  size_t late = phantom_now - waited;
  waited = phantom_now;
  if (phantom_nccl && late > QUEUE) usleep(150000);
  return OK;
}

int cudaEventSynchronize(void *event) {
  return waited = *time_of(event) > waited ? *time_of(event) : waited, OK;
}

int cudaEventQuery(void *event) {
  size_t time = *time_of(event), behind = phantom_launches ? QUEUE : 2 * QUEUE;
  return time <= waited || time + behind <= phantom_now++ ? OK : NOT_READY;
}

int cudaEventRecord(void *event, void *stream) { return *time_of(event) = LAUNCH, OK; }
