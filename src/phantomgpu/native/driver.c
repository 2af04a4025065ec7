/* libcuda.so.1: what torch, Triton and extensions ask of the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "device.h"

/* Devices and contexts: what is not here gives an answer only (answers.txt). */
int cuPointerGetAttribute(void *value, int attribute, size_t pointer) {
  int owner = phantom_owner((void *)pointer);
  if (owner < 0) return INVALID_VALUE;
  switch (attribute) {
    case 1: *(size_t *)value = owner + 1; return OK; /* its context */
    case 2: *(unsigned *)value = 2; return OK; /* memory of a device */
    case 3: *(size_t *)value = pointer; return OK;
    case 8: *(unsigned *)value = 0; return OK; /* managed? */
    case 9: *(int *)value = owner; return OK;
    case 11: return phantom_block(pointer, value, NULL);
    case 12: return phantom_block(pointer, NULL, value);
    default: return NOT_SUPPORTED;
  }
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                size_t shared) {
  *blocks = threads > 0 && threads < facts.threads ? facts.threads / threads : 1;
  if (shared && *blocks > facts.shared_per_processor / (long)shared)
    *blocks = facts.shared_per_processor / (long)shared;
  if (*blocks > facts.blocks) *blocks = facts.blocks;
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

