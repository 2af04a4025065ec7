/* libnccl: collectives of ranks that do not exist. What they write is known to ranks.py; only what
   ranks gather is written here, too, for torch before 2.10. */
#include <stdlib.h>

#include "device.h"

#define UNHANDLED 1 /* ncclUnhandledCudaError */

struct communicator {
  int ranks, rank, device; /* in this order: answers.txt */
  size_t buffers;
};
struct id { char bytes[128]; };
static const int BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* of each ncclDataType_t */

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && atol(text) > 0 ? (size_t)atol(text) : otherwise;
}

/* The buffers of a communicator of 2 ranks and of more, as measured on A100 with NVLink in
   github.com/NVIDIA/nccl/issues/964; they depend on channels (24 there), and little on how many more
   ranks. A channel sends from 2 MiB and receives into the buffers of three protocols: src/init.cc
   and src/transport/p2p.cc of NCCL 2.29. */
static size_t of(int ranks) {
  size_t protocols = number("NCCL_LL_BUFFSIZE", 512 << 10) + number("NCCL_BUFFSIZE", 4 << 20) +
                     number("NCCL_LL128_BUFFSIZE", 4915200) + 4096;
  size_t channel = (protocols + PAGE - 1) / PAGE * PAGE + PAGE, most = number("NCCL_MAX_NCHANNELS", 24);
  size_t measured = (size_t)(ranks < 2 ? 0 : ranks < 3 ? 544 : 688) << 20;
  return (size_t)((double)measured * (most < 24 ? most : 24) / 24 * channel / (12 << 20)) / PAGE * PAGE;
}

static int make(struct communicator **to, int ranks, int rank, size_t bytes) {
  if (!phantom_connect(current_device, bytes)) return UNHANDLED;
  *to = malloc(sizeof **to);
  **to = (struct communicator){ranks, rank, current_device, bytes};
  return 0;
}

int ncclCommDestroy(struct communicator *one) {
  phantom_connect(one->device, -(long)one->buffers);
  free(one);
  return 0;
}

int ncclCommInitRank(struct communicator **to, int ranks, struct id id, int rank) {
  return make(to, ranks, rank, of(ranks));
}

int ncclCommInitRankScalable(struct communicator **to, int ranks, int rank, int ids,
                             struct id *id, void *config) {
  return make(to, ranks, rank, of(ranks));
}

/* How many ranks share the colour is not known here; the buffers are those of all ranks. */
int ncclCommSplit(struct communicator *from, int colour, int key, struct communicator **to,
                  void *config) {
  *to = NULL;
  return colour < 0 ? 0 : make(to, 1, 0, from->buffers);
}

#define SERVER 8 /* GPUs that NVLink joins */

/* Counts what a rank must receive, if ranks of a group are neighbours: all that it does not have, and
   its share of what its server does not have. It holds for rings and trees, and is half of what they
   move in an all-reduce, which switches may add up. `count` is of all together, or of `each` rank. */
void phantom_cross(long group, size_t count, int type, int each) {
  double ranks = ((struct communicator *)group)->ranks;
  double total = (double)count * BYTES[type] * (each ? ranks : 1);
  phantom_inside += total * (ranks - 1) / ranks;
  if (ranks > SERVER) phantom_between += total * (ranks - SERVER) / ranks / SERVER;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root,
                  struct communicator *among, void *stream) {
  phantom_cross((long)among, count, type, 0);
  if (from && to) phantom_copy(to, from, count * BYTES[type]);
  return 0;
}

int ncclAllGather(const void *from, char *to, size_t count, int type, struct communicator *among,
                  void *stream) {
  size_t bytes = count * BYTES[type];
  phantom_cross((long)among, count, type, 1);
  /* The bytes of large tensors are not worth keeping for each rank. */
  if (bytes > (1 << 20)) return phantom_set(to, 0, 1, bytes * among->ranks), 0;
  char *own = malloc(bytes + 1); /* `from` may lie inside `to` */
  phantom_copy(own, from, bytes);
  for (int rank = 0; rank < among->ranks; rank++) phantom_copy(to + rank * bytes, own, bytes);
  free(own);
  return 0;
}

int ncclRecv(void *to, size_t count, int type, int peer, void *among, void *stream) {
  return phantom_inside += count * BYTES[type], 0;
}
