/* Facts and memory of the device; part of libcuda.so.1, which the runtime links. */
#include "device.h"

#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB ((size_t)1 << 30)
#define MIB (1 << 20)
#define KIB (1 << 10)

/* From "Compute Capabilities" in NVIDIA's CUDA programming guide and the white papers of each
   generation. Every kind has 65,536 registers and 48 KiB of shared memory a block by default. */
static const struct phantom_kind KINDS[] = {
    {"a100", "Phantom A100", 80 * GIB, 8, 0, 80, 108, 2048, 32, 163 * KIB, 164 * KIB, 40 * MIB},
    {"h100", "Phantom H100", 80 * GIB, 9, 0, 90, 132, 2048, 32, 227 * KIB, 228 * KIB, 50 * MIB},
    {"b200", "Phantom B200", 180 * GIB, 10, 0, 100, 148, 2048, 32, 227 * KIB, 228 * KIB, 126 * MIB},
    {"rtx4090", "Phantom RTX 4090", 24 * GIB, 8, 9, 86, 128, 1536, 24, 99 * KIB, 100 * KIB,
     72 * MIB},
    {"rtx5090", "Phantom RTX 5090", 32 * GIB, 12, 0, 120, 170, 1536, 24, 99 * KIB, 100 * KIB,
     96 * MIB},
};

/* Each device has 5 TiB of addresses: above small programs, below where Linux puts libraries. */
#define FIRST_ADDRESS ((size_t)1 << 40)
#define ADDRESSES ((size_t)5 << 40)

struct range {
  size_t address, bytes;
};

static struct {
  size_t used;
  struct range *ranges; /* in the order of their addresses */
  size_t num_ranges, room;
} devices[PHANTOM_MOST_DEVICES];

_Thread_local int phantom_current_device;
static const struct phantom_kind *kind = &KINDS[1];
static int num_devices = 1;
static size_t memory;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void give_up(const char *variable, const char *text, const char *instead) {
  fprintf(stderr, "cannot use %s=%s; write %s\n", variable, text, instead);
  exit(1);
}

__attribute__((constructor)) static void read_environment(void) {
  const char *text = getenv("PHANTOM_KIND");
  if (text) {
    kind = NULL;
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
      if (!strcmp(text, KINDS[i].key)) kind = &KINDS[i];
    if (!kind) give_up("PHANTOM_KIND", text, "a100, h100, b200, rtx4090 or rtx5090");
  }
  memory = kind->memory;
  if ((text = getenv("PHANTOM_MEMORY"))) {
    char *end;
    memory = strtoull(text, &end, 10);
    if (*end || end == text) give_up("PHANTOM_MEMORY", text, "a number of bytes");
  }
  if ((text = getenv("PHANTOM_DEVICES"))) {
    char *end;
    long number = strtol(text, &end, 10);
    if (*end || end == text || number < 0 || number > PHANTOM_MOST_DEVICES)
      give_up("PHANTOM_DEVICES", text, "a number from 0 to 16");
    num_devices = number;
  }
}

const struct phantom_kind *phantom_kind(void) { return kind; }
int phantom_attribute(int attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return kind->major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return kind->minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return kind->processors;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return kind->threads_per_processor;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return kind->blocks_per_processor;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 * KIB;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return kind->shared_per_block_optin;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return kind->shared_per_processor;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return KIB;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return kind->l2_cache;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return 1;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 1;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}

int phantom_devices(void) { return num_devices; }
size_t phantom_memory(void) { return memory; }
void phantom_set_memory(size_t bytes) { memory = bytes; }

size_t phantom_free_memory(int device) {
  return memory > devices[device].used ? memory - devices[device].used : 0;
}

int phantom_take(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int fits = bytes <= phantom_free_memory(device);
  if (fits) devices[device].used += bytes;
  pthread_mutex_unlock(&lock);
  return fits;
}

void phantom_give(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  devices[device].used -= bytes;
  pthread_mutex_unlock(&lock);
}

/* The first place behind all ranges; when that is used up, the first gap that is large enough.
   Ranges never touch, and later ones lie higher: of equal blocks, torch takes the lowest. */
static size_t place(int device, size_t bytes, size_t *index) {
  size_t from = FIRST_ADDRESS + device * ADDRESSES, end = from + ADDRESSES;
  size_t count = devices[device].num_ranges;
  struct range *ranges = devices[device].ranges;
  *index = count;
  size_t last = count ? ranges[count - 1].address + ranges[count - 1].bytes + PHANTOM_PAGE : from;
  if (last + bytes <= end) return last;
  for (*index = 0; *index < count; ++*index) {
    if (from + bytes + PHANTOM_PAGE <= ranges[*index].address) return from;
    from = ranges[*index].address + ranges[*index].bytes + PHANTOM_PAGE;
  }
  return 0;
}

size_t phantom_address(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  size_t index, address = place(device, bytes, &index), count = devices[device].num_ranges;
  if (address) {
    if (count == devices[device].room) {
      devices[device].room = count ? 2 * count : 64;
      devices[device].ranges =
          realloc(devices[device].ranges, devices[device].room * sizeof(struct range));
    }
    struct range *here = devices[device].ranges + index;
    memmove(here + 1, here, (count - index) * sizeof *here);
    *here = (struct range){address, bytes};
    devices[device].num_ranges++;
  }
  pthread_mutex_unlock(&lock);
  return address;
}

size_t phantom_return(size_t address) {
  int device = phantom_owner((void *)address);
  size_t bytes = 0;
  if (device < 0) return 0;
  pthread_mutex_lock(&lock);
  size_t low = 0, high = devices[device].num_ranges;
  struct range *ranges = devices[device].ranges;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].address < address)
      low = middle + 1;
    else
      high = middle;
  }
  if (low < devices[device].num_ranges && ranges[low].address == address) {
    bytes = ranges[low].bytes;
    memmove(ranges + low, ranges + low + 1,
            (--devices[device].num_ranges - low) * sizeof *ranges);
  }
  pthread_mutex_unlock(&lock);
  return bytes;
}

int phantom_owner(const void *address) {
  size_t offset = (size_t)address - FIRST_ADDRESS;
  return (size_t)address >= FIRST_ADDRESS && offset < num_devices * ADDRESSES
             ? (int)(offset / ADDRESSES)
             : -1;
}
