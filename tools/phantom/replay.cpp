// Replays traces against torch's own caching allocator, on the phantom; see make.py.
//
// Reads lines from stdin:
//   t LIMIT ALLOWED     begin a trace on a device with LIMIT bytes left; ALLOWED, if not 0, is what
//                       torch lets the process take (set_per_process_memory_fraction)
//   a KEY BYTES STREAM  allocate
//   f KEY               free; a key that is not there is ignored
//   e                   end the trace
// Prints a line for each trace: the bytes reserved at the end and at the peak, the bytes of blocks
// in use at the end and at the peak, and the places (from 0) of the allocations that failed.
// Settings are torch's: PYTORCH_ALLOC_CONF.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <unordered_map>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;
namespace c10::cuda::_internal {  // in no header that is installed
C10_CUDA_API void setHasPrimaryContext(bool (*function)(DeviceIndex));
}
extern "C" size_t phantom_memory(void);
extern "C" void phantom_set_memory(size_t bytes);

int main() {
  std::unordered_map<long, void*> blocks;
  std::vector<long> failed;
  long key, line = 0, stream, trace = 0;
  // torch keeps the size that the device had at the start.
  size_t bytes, allowed, total = phantom_memory();
  char command;
  // What libtorch_cuda does when it is loaded.
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::init(1);
  while (scanf(" %c", &command) == 1) {
    if (command == 't') {
      if (scanf("%zu %zu", &bytes, &allowed) != 2) return 2;
      phantom_set_memory(bytes);
      if (allowed) allocator::get()->setMemoryFraction((double)allowed / total, 0);
      allocator::resetPeakStats(0);
      failed.clear();
      line = 0;
      trace++;
    } else if (command == 'a') {
      if (scanf("%ld %zu %ld", &key, &bytes, &stream) != 3) return 2;
      try {
        // The allocator only compares streams, so their handles may be any numbers. Each trace has
        // its own: an empty expandable segment of a failed allocation is kept for its stream.
        auto handle = reinterpret_cast<cudaStream_t>(trace << 12 | stream);
        if (bytes) blocks[key] = allocator::raw_alloc_with_stream(bytes, handle);
      } catch (const c10::OutOfMemoryError&) {
        failed.push_back(line);
      }
      line++;
    } else if (command == 'f') {
      if (scanf("%ld", &key) != 1) return 2;
      auto block = blocks.find(key);
      if (block != blocks.end()) {
        allocator::raw_delete(block->second);
        blocks.erase(block);
      }
      line++;
    } else if (command == 'e') {
      auto stats = allocator::getDeviceStats(0);
      printf("%ld %ld %ld %ld", (long)stats.reserved_bytes[0].current,
             (long)stats.reserved_bytes[0].peak, (long)stats.allocated_bytes[0].current,
             (long)stats.allocated_bytes[0].peak);
      for (long place : failed) printf(" %ld", place);
      printf("\n");
      for (auto& [_, block] : blocks) allocator::raw_delete(block);
      blocks.clear();
      allocator::emptyCache();
    } else {
      return 2;
    }
  }
  fflush(stdout);
  _exit(0);
}
