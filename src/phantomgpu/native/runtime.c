/* libcudart: devices, memory, copies, streams, graphs. Kernels are launched and do nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device.h"

typedef void *stream_t, *event_t, *graph_t;

static _Thread_local int last_error;

static int fail(int error) { return last_error = error; }

int cudaGetLastError(void) {
  int error = last_error;
  last_error = OK;
  return error;
}

int cudaPeekAtLastError(void) { return last_error; }

/* Devices */

int cudaGetDeviceCount(int *count) {
  *count = facts.devices;
  return *count ? OK : fail(NO_DEVICE);
}

int cudaSetDevice(int device) {
  if (device < 0 || device >= facts.devices) return fail(INVALID_DEVICE);
  current_device = device;
  return OK;
}

static const struct {
  int attribute, offset, bytes;
} PROPERTIES[] = {
#define PROPERTY(number, at13, at12, bytes, value) {number, CUDA == 12 ? at12 : at13, bytes},
#include "properties.txt"
};

int cudaGetDeviceProperties_v2(char *to, int device) {
  if (device < 0 || device >= facts.devices) return fail(INVALID_DEVICE);
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

int cudaGetDeviceProperties(char *to, int device) { return cudaGetDeviceProperties_v2(to, device); }

/* Memory of devices */

int cudaMalloc(void **pointer, size_t bytes) {
  int error = phantom_malloc(pointer, bytes, current_device);
  return error ? fail(error) : OK;
}

/* The pool of device n is the address n + 1; it returns freed memory at once. */
int cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
  int device = (int)(size_t)pool - 1; /* 5 and 7 are what is there now, 6 and 8 the highest */
  *value = attribute == 6 || attribute == 8   ? phantom_highest(device) - facts.context
           : attribute == 5 || attribute == 7 ? phantom_used(device) - facts.context
                                              : 0;
  return OK;
}

/* Memory of the host that CUDA knows: pinned, or managed. Newest first. */
struct host {
  char *address;
  size_t bytes;
  int type; /* as cudaMemoryType: 1 pinned, 3 managed */
  struct host *next;
};
static struct host *hosts;
static size_t managed;
static pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER;

static int host_alloc(void **pointer, size_t bytes, int type) {
  struct host *one = malloc(sizeof *one);
  void *got = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *pointer = got == MAP_FAILED ? NULL : got;
  if (!*pointer || !one) return fail(OUT_OF_MEMORY);
  pthread_mutex_lock(&host_lock);
  *one = (struct host){got, bytes ? bytes : 1, type, hosts};
  hosts = one;
  if (type == 3 && (managed += bytes) > phantom_most_managed) phantom_most_managed = managed;
  pthread_mutex_unlock(&host_lock);
  return OK;
}

static int host_free(void *pointer) {
  int error = pointer ? INVALID_VALUE : OK;
  pthread_mutex_lock(&host_lock);
  for (struct host **link = &hosts; *link; link = &(*link)->next)
    if ((*link)->address == pointer) {
      struct host *one = *link;
      *link = one->next;
      if (one->type == 3) managed -= one->bytes;
      munmap(one->address, one->bytes);
      free(one);
      error = OK;
      break;
    }
  pthread_mutex_unlock(&host_lock);
  return error ? fail(error) : OK;
}

static int host_type(const void *pointer) {
  int type = 0;
  pthread_mutex_lock(&host_lock);
  for (struct host *one = hosts; one && !type; one = one->next)
    if ((size_t)((char *)pointer - one->address) < one->bytes) type = one->type;
  pthread_mutex_unlock(&host_lock);
  return type;
}

int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  return host_alloc(pointer, bytes, 1);
}

int cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
  return host_alloc(pointer, bytes, 3);
}

int cudaFreeHost(void *pointer) { return host_free(pointer); }

int cudaFree(void *pointer) {
  if (pointer && phantom_owner(pointer) < 0) return host_free(pointer);
  int error = phantom_free(pointer);
  return error ? fail(error) : OK;
}

struct pointer_facts {
  int type, device;
  void *on_device, *on_host;
  long reserved[8];
};

int cudaPointerGetAttributes(struct pointer_facts *to, const void *pointer) {
  int owner = phantom_owner(pointer);
  *to = (struct pointer_facts){owner < 0 ? host_type(pointer) : 2, owner < 0 ? 0 : owner};
  if (to->type) to->on_device = (void *)pointer;
  if (owner < 0) to->on_host = (void *)pointer;
  return OK;
}

/* Copies */

int cudaMemcpy2D(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width,
                 size_t height, int kind) {
  for (size_t row = 0; row < height; row++)
    phantom_copy(to + row * to_pitch, from + row * from_pitch, width);
  return OK;
}

int cudaGetSymbolAddress(void **pointer, const void *symbol) {
  static char symbols[1 << 16];
  *pointer = symbols;
  return OK;
}

/* Streams and events are handles that are never read. While one stream is captured, torch allocates
   from the pool of the graph, on those that join it, too: so all of them are. */

static uint64_t capture;
static graph_t graph;

/* The device is behind the program until the program waits for it, or as many launches followed as
   the queue holds: about 1,000 (forums.developer.nvidia.com/t/68937). Until then memory that other
   streams use stays taken. A thread that only asks is NCCL's watchdog: it asks every 0.1 seconds,
   which is about as many launches again where a kernel takes 0.1 ms. */
#define QUEUE (1024 * 64)
static size_t waited, recorded[1 << 16];

static size_t *time_of(event_t event) { return recorded + (size_t)event / 64 % (1 << 16); }

/* While a program waits for much, NCCL's watchdog asks. */
int cudaDeviceSynchronize(void) {
  size_t late = phantom_now - waited;
  waited = phantom_now;
  if (phantom_nccl && late > QUEUE) usleep(150000);
  return OK;
}

int cudaEventSynchronize(event_t event) {
  return waited = *time_of(event) > waited ? *time_of(event) : waited, OK;
}

int cudaEventQuery(event_t event) {
  size_t time = *time_of(event), behind = phantom_launches ? QUEUE : 2 * QUEUE;
  return time <= waited || time + behind <= phantom_now++ ? OK : NOT_READY;
}

int cudaEventRecord(event_t event, stream_t stream) { return *time_of(event) = LAUNCH, OK; }

int cudaStreamBeginCapture(stream_t stream, int mode) {
  capture++;
  graph = phantom_handle();
  return OK;
}

int cudaStreamBeginCaptureToGraph(stream_t stream, graph_t to, const void *nodes,
                                  const void *edges, size_t count, int mode) {
  cudaStreamBeginCapture(stream, mode);
  graph = to;
  return OK;
}

int cudaStreamEndCapture(stream_t stream, graph_t *to) {
  *to = graph;
  graph = NULL;
  return OK;
}

int cudaStreamIsCapturing(stream_t stream, int *status) {
  *status = graph != NULL;
  return OK;
}

int cudaStreamGetCaptureInfo(stream_t stream, int *status, uint64_t *id, graph_t *to,
                             const void **nodes, const void **edges, size_t *count) {
  *status = graph != NULL;
  if (*status && id) *id = capture;
  if (*status && to) *to = graph;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return OK;
}

/* One node, of a kernel, so that torch does not warn of an empty graph. */
int cudaGraphGetNodes(graph_t from, void **nodes, size_t *count) {
  if (!nodes)
    *count = 1;
  else if (*count)
    nodes[0] = (void *)16;
  return OK;
}

int cudaLaunchHostFunc(stream_t stream, void (*function)(void *), void *argument) {
  if (!graph) function(argument);
  return OK;
}

int cudaStreamAddCallback(stream_t stream, void (*function)(stream_t, int, void *), void *argument,
                          unsigned flags) {
  function(stream, OK, argument);
  return OK;
}

/* Kernels */

int cudaFuncGetAttributes(int *to, const void *function) {
  memset(to, 0, 144);
  to[6] = 1024;                          /* threads per block */
  to[7] = 32;                            /* registers: so few that they never limit the blocks */
  to[8] = to[9] = facts.code;            /* versions of PTX and of the code */
  to[11] = facts.shared_per_block_optin; /* dynamic shared memory */
  return OK;
}

/* The next functions are called by code that nvcc writes. */

void **__cudaRegisterFatBinary(void *binary) {
  static void *registered;
  return &registered;
}

