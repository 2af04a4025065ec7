/* The device that does not exist: its facts, how its memory is counted, and what its bytes are. */
#ifndef PHANTOMGPU_DEVICE_H
#define PHANTOMGPU_DEVICE_H
#include <stddef.h>

#define PAGE ((size_t)2 << 20) /* the driver hands out pages of 2 MiB */
#define MOST_DEVICES 16
#define LAUNCH (phantom_launches = 1, phantom_now += 64)

/* Memory of the host that CUDA knows lies where further devices would. */
enum { PINNED = MOST_DEVICES, MANAGED, PLACES };

/* Error numbers, the same in the runtime and the driver. */
enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE = 100, INVALID_DEVICE };
enum { NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801 };

/* From the environment variable PHANTOMGPU_FACTS, in this order, separated by spaces. */
struct facts {
  size_t memory, context; /* bytes that a program sees, and bytes that its context takes of them */
  int devices;
  int major, minor; /* compute capability */
  int code;         /* which of torch's compiled code runs: sm_86 serves 8.9 */
  int processors, threads, blocks;                  /* the last two per processor */
  int shared_per_block_optin, shared_per_processor; /* bytes */
  int l2_cache;                                     /* bytes */
  char name[64];
};
extern struct facts facts;
extern _Thread_local int current_device;
/* Of the runtime, which remembers errors; and the graph that is captured, and how many there were. */
int phantom_fail(int error);
extern void *phantom_graph;
extern size_t phantom_captures;
extern size_t phantom_most_managed; /* most bytes of managed memory, which lie on the host */
extern double phantom_inside, phantom_between; /* bytes that NCCL moved, see nccl.c */
extern size_t phantom_now;          /* one more for a question, and 64 more for a launch */
extern _Thread_local int phantom_launches; /* whether this thread ever did, or only asks */
extern size_t phantom_nccl;         /* most bytes of NCCL's own buffers */
extern size_t phantom_assumed;      /* whose workspaces are not known: 1 Xgeev, 2 cuFFT, 4 cuSPARSE;
                                       8: a function was not there; 16: cudaMallocAsync failed */

/* An attribute, numbered as in CUdevice_attribute and cudaDeviceAttr; 0 if unknown. */
int phantom_attribute(int attribute);
const char *phantom_error(int error);
void *phantom_function(const char *name);

/* Physical memory: whether it is there, and its return. */
int phantom_take(int device, size_t bytes);
void phantom_give(int device, size_t bytes);
int phantom_connect(int device, long bytes); /* NCCL's buffers; less than 0 to give them back */
void phantom_cross(long group, size_t count, int type, int each); /* counts a collective */
size_t phantom_used(int device), phantom_highest(int device);

/* Addresses; 0 if none is left. phantom_return gives the size, or 0 for an unknown address. */
size_t phantom_reserve(int device, size_t bytes);
size_t phantom_return(size_t address);
int phantom_malloc(void **pointer, size_t bytes, int device);
int phantom_free(void *pointer);
int phantom_block(size_t address, size_t *first, size_t *bytes);
/* The device that an address belongs to, or -1; and the place, if it is in use. */
int phantom_owner(const void *address), phantom_place(const void *address);

/* A handle that is never read: of a stream, a kernel, a library. */
void *phantom_handle(void);

/* Bytes: what was copied to a device can be read back, what a kernel would write is zero. */
void phantom_copy(void *to, const void *from, size_t bytes);
int phantom_write(void *to, const void *from, size_t bytes);
void phantom_set(void *to, int value, size_t width, size_t count);
#endif
