/* Facts, memory and bytes of the devices; part of libcuda.so.1, which the other stand-ins link. */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Each device has 2 TiB of addresses from 32 TiB on: below, mimalloc asks for addresses; above 85
   TiB, Linux puts programs. The kernel adds a page of RAM only where something is written. */
#define FIRST_ADDRESS ((size_t)32 << 40)
#define ADDRESSES ((size_t)2 << 40)
/* Larger copies to a device are counted, but their bytes are zero: they are weights or images.
   What values.py writes is kept up to four million whole numbers of eight bytes. */
#define LARGEST_KEPT ((size_t)4 << 20)
#define LARGEST_WRITTEN ((size_t)32 << 20)
#define MOST_KEPT ((size_t)1 << 30)

struct facts facts = {(size_t)80 << 30, 0, 1, 9, 0, 90, 132, 2048, 32, 232448, 233472, 50 << 20,
                      "phantomgpu"};
_Thread_local int current_device, phantom_launches;
double phantom_inside, phantom_between;
size_t phantom_most_managed, phantom_nccl, phantom_assumed, phantom_now;

/* Ranges of addresses that do not overlap, in ascending order. */
struct range { size_t from, to; };
struct ranges { struct range *at; size_t count, room; };

static struct { size_t used, highest; int mapped; struct ranges reserved; } devices[PLACES];
static struct ranges written; /* all other bytes of the devices are zero */
static size_t kept;           /* bytes in these ranges */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void read_environment(void) {
  const char *text = getenv("PHANTOMGPU_FACTS");
  if (text && sscanf(text, "%zu %zu %d %d %d %d %d %d %d %d %d %d %63[^\n]", &facts.memory,
                     &facts.context, &facts.devices, &facts.major, &facts.minor, &facts.code,
                     &facts.processors, &facts.threads, &facts.blocks,
                     &facts.shared_per_block_optin, &facts.shared_per_processor, &facts.l2_cache,
                     facts.name) != 13) {
    fprintf(stderr, "phantomgpu: cannot read PHANTOMGPU_FACTS=%s\n", text);
    exit(1);
  }
}

/* Index of the first range that ends above the address. */
static size_t find(const struct ranges *ranges, size_t address) {
  size_t low = 0, high = ranges->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges->at[middle].to <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void insert(struct ranges *ranges, size_t index, size_t from, size_t to) {
  if (ranges->count == ranges->room) {
    ranges->room = ranges->room ? 2 * ranges->room : 256;
    ranges->at = realloc(ranges->at, ranges->room * sizeof *ranges->at);
  }
  memmove(ranges->at + index + 1, ranges->at + index,
          (ranges->count++ - index) * sizeof *ranges->at);
  ranges->at[index] = (struct range){from, to};
}

static void erase(struct ranges *ranges, size_t index, size_t count) {
  ranges->count -= count;
  memmove(ranges->at + index, ranges->at + index + count,
          (ranges->count - index) * sizeof *ranges->at);
}

int phantom_attribute(int attribute) {
  switch (attribute) {
#define PROPERTY(number, at13, at12, bytes, value) case number: return value;
#include "properties.txt"
    default: return 0;
  }
}

const char *phantom_error(int error) {
  switch (error) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    default: return "phantomgpu does not have this function of CUDA";
  }
}

void *phantom_handle(void) {
  static size_t last = 1 << 20;
  return (void *)__atomic_add_fetch(&last, 64, __ATOMIC_RELAXED);
}

size_t phantom_used(int device) { return devices[device].used + facts.context; }
size_t phantom_highest(int device) { return devices[device].highest + facts.context; }

int phantom_take(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int fits = device >= PINNED || devices[device].used + facts.context + bytes <= facts.memory;
  if (fits && (devices[device].used += bytes) > devices[device].highest)
    devices[device].highest = devices[device].used;
  phantom_most_managed = devices[MANAGED].highest;
  pthread_mutex_unlock(&lock);
  return fits;
}

void phantom_give(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  devices[device].used -= bytes;
  pthread_mutex_unlock(&lock);
}

int phantom_connect(int device, long bytes) {
  static long connected;
  if (bytes > 0 && !phantom_take(device, bytes)) return 0;
  if (bytes < 0) phantom_give(device, -bytes);
  if ((connected += bytes) > (long)phantom_nccl) phantom_nccl = connected;
  return 1;
}

static int place_of(size_t address) {
  size_t place = (address - FIRST_ADDRESS) / ADDRESSES;
  return address >= FIRST_ADDRESS && place < PLACES ? (int)place : -1;
}

int phantom_place(const void *address) {
  return phantom_block((size_t)address, NULL, NULL) ? -1 : place_of((size_t)address);
}

int phantom_owner(const void *address) {
  int place = place_of((size_t)address);
  return place < facts.devices ? place : -1;
}

/* The first place behind all ranges; when that is used up, the first gap that is large enough.
   Ranges never touch, and later ones lie higher: of equal blocks, torch takes the lowest. */
static size_t place(int device, size_t bytes, size_t *index) {
  struct ranges *ranges = &devices[device].reserved;
  size_t from = FIRST_ADDRESS + device * ADDRESSES, end = from + ADDRESSES;
  *index = ranges->count;
  size_t last = ranges->count ? ranges->at[ranges->count - 1].to + PAGE : from;
  if (last + bytes <= end) return last;
  for (*index = 0; *index < ranges->count; ++*index) {
    if (from + bytes + PAGE <= ranges->at[*index].from) return from;
    from = ranges->at[*index].to + PAGE;
  }
  return 0;
}

static int map(int device) {
  void *wanted = (void *)(FIRST_ADDRESS + device * ADDRESSES);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap(wanted, ADDRESSES, PROT_READ | PROT_WRITE, flags, -1, 0) != wanted) {
    fprintf(stderr, "phantomgpu: cannot reserve 2 TiB of addresses; raise ulimit -v and allow "
                    "overcommit (vm.overcommit_memory 0 or 1)\n");
    exit(1);
  }
  madvise(wanted, ADDRESSES, MADV_DONTDUMP);
  madvise(wanted, ADDRESSES, MADV_NOHUGEPAGE);
  return 1;
}

size_t phantom_reserve(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (!devices[device].mapped) devices[device].mapped = map(device);
  size_t index, address = place(device, bytes, &index);
  if (address) insert(&devices[device].reserved, index, address, address + bytes);
  pthread_mutex_unlock(&lock);
  return address;
}

/* Make bytes zero again; the caller holds the lock. */
static void forget(size_t from, size_t to) {
  for (size_t i = find(&written, from); i < written.count && written.at[i].from < to;) {
    struct range had = written.at[i];
    size_t first = had.from > from ? had.from : from, last = had.to < to ? had.to : to;
    size_t page = (first + 4095) & ~(size_t)4095, end = last & ~(size_t)4095;
    if (end > page && end - page > 262144) {
      memset((void *)first, 0, page - first);
      memset((void *)end, 0, last - end);
      madvise((void *)page, end - page, MADV_DONTNEED);
    } else {
      memset((void *)first, 0, last - first);
    }
    kept -= last - first;
    erase(&written, i, 1);
    if (had.to > last) insert(&written, i, last, had.to);
    if (had.from < first) insert(&written, i++, had.from, first);
    if (had.to > last) i++;
  }
}

/* Note that bytes may be other than zero; the caller holds the lock. */
static void note(size_t from, size_t to) {
  size_t i = find(&written, from - 1), count = 0;
  for (; i + count < written.count && written.at[i + count].from <= to; count++) {
    struct range had = written.at[i + count];
    kept -= had.to - had.from;
    if (had.from < from) from = had.from;
    if (had.to > to) to = had.to;
  }
  erase(&written, i, count);
  insert(&written, i, from, to);
  kept += to - from;
}

static int keeps(size_t bytes, size_t largest) {
  return bytes <= largest && (bytes <= 65536 || kept + bytes <= MOST_KEPT);
}

/* Returns whether the bytes are there now. */
static int put(void *to, const void *from, size_t bytes, size_t largest) {
  if (!bytes || to == from) return 1;
  if (phantom_owner(to) < 0) return memmove(to, from, bytes), 1;
  size_t begin = (size_t)to, source = (size_t)from;
  pthread_mutex_lock(&lock);
  size_t i = find(&written, source);
  int is_zero =
      phantom_owner(from) >= 0 && (i == written.count || written.at[i].from >= source + bytes);
  int is_kept = keeps(bytes, largest);
  if (is_zero || !is_kept) forget(begin, begin + bytes);
  else memmove(to, from, bytes), note(begin, begin + bytes);
  pthread_mutex_unlock(&lock);
  return is_zero || is_kept;
}

void phantom_copy(void *to, const void *from, size_t bytes) { put(to, from, bytes, LARGEST_KEPT); }

int phantom_write(void *to, const void *from, size_t bytes) {
  return put(to, from, bytes, LARGEST_WRITTEN);
}

/* `count` values of 1, 2 or 4 bytes. */
void phantom_set(void *to, int value, size_t width, size_t count) {
  size_t begin = (size_t)to, bytes = width * count;
  int owned = phantom_owner(to) >= 0;
  pthread_mutex_lock(&lock);
  if (owned && (!value || !keeps(bytes, LARGEST_KEPT))) {
    forget(begin, begin + bytes);
  } else {
    for (size_t i = 0; i < count; i++) memcpy((char *)to + i * width, &value, width);
    if (owned && bytes) note(begin, begin + bytes);
  }
  pthread_mutex_unlock(&lock);
}

size_t phantom_return(size_t address) {
  int device = place_of(address);
  size_t bytes = 0;
  if (device < 0) return 0;
  pthread_mutex_lock(&lock);
  struct ranges *ranges = &devices[device].reserved;
  size_t i = find(ranges, address);
  if (i < ranges->count && ranges->at[i].from == address) {
    bytes = ranges->at[i].to - address;
    forget(address, address + bytes);
    if (device >= PINNED) madvise((void *)address, bytes, MADV_DONTNEED);
    erase(ranges, i, 1);
  }
  pthread_mutex_unlock(&lock);
  return bytes;
}

int phantom_malloc(void **pointer, size_t bytes, int device) {
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  *pointer = NULL;
  if (!bytes) return OK;
  if (!phantom_take(device, bytes)) return OUT_OF_MEMORY;
  *pointer = (void *)phantom_reserve(device, bytes);
  if (*pointer) return OK;
  phantom_give(device, bytes);
  return OUT_OF_MEMORY;
}

int phantom_free(void *pointer) {
  if (!pointer) return OK;
  size_t bytes = phantom_return((size_t)pointer);
  if (!bytes) return INVALID_VALUE;
  phantom_give(place_of((size_t)pointer), bytes);
  return OK;
}

int phantom_block(size_t address, size_t *first, size_t *bytes) {
  int device = place_of(address);
  if (device < 0) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  struct ranges *ranges = &devices[device].reserved;
  size_t i = find(ranges, address);
  int found = i < ranges->count && ranges->at[i].from <= address;
  if (found && first) *first = ranges->at[i].from;
  if (found && bytes) *bytes = ranges->at[i].to - ranges->at[i].from;
  pthread_mutex_unlock(&lock);
  return found ? OK : INVALID_VALUE;
}
