/* The device that is not there: its facts, and how its memory is counted. */
#ifndef PHANTOM_DEVICE_H
#define PHANTOM_DEVICE_H
#include <stddef.h>

#define PHANTOM_PAGE ((size_t)2 << 20) /* the driver hands out pages of 2 MiB */
#define PHANTOM_MOST_DEVICES 16

struct phantom_kind {
  const char *key;  /* as PHANTOM_KIND names it */
  const char *name; /* as torch.cuda.get_device_name returns it */
  size_t memory;    /* bytes, if PHANTOM_MEMORY does not say */
  int major, minor; /* compute capability */
  int code;         /* which of torch's compiled code it runs: sm_86 serves 8.9 */
  int processors, threads_per_processor, blocks_per_processor;
  int shared_per_block_optin, shared_per_processor; /* bytes */
  int l2_cache;                                     /* bytes */
};

extern _Thread_local int phantom_current_device;

const struct phantom_kind *phantom_kind(void);
/* An attribute, numbered as in CUdevice_attribute and cudaDeviceAttr; 0 if unknown. */
int phantom_attribute(int attribute);
int phantom_devices(void);
size_t phantom_memory(void);
size_t phantom_free_memory(int device);
/* For programs that replay many traces in one process. */
void phantom_set_memory(size_t bytes);

/* Count physical memory; 0 if the device has not that much left. */
int phantom_take(int device, size_t bytes);
void phantom_give(int device, size_t bytes);

/* Addresses; 0 if none is left. phantom_return gives the size, or 0 for an unknown address. */
size_t phantom_address(int device, size_t bytes);
size_t phantom_return(size_t address);
/* The device that an address belongs to, or -1. */
int phantom_owner(const void *address);
#endif
