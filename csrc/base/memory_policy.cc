#include "base/memory_policy.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace tilewright {
namespace {

// From linux/mempolicy.h, whose older versions lack the last one (it came with Linux 5.15).
constexpr int kDefault = 0, kPreferred = 1, kInterleave = 3, kPreferredMany = 5;
constexpr int kMaxNodes = 1024;  // enough for any kernel: its largest NODES_SHIFT is 10
constexpr int kBitsPerWord = 8 * sizeof(unsigned long);

int set_mode(int mode, const unsigned long* mask) {
  // The system call reads one bit less than it is told.
  return syscall(SYS_set_mempolicy, mode, mask, mask ? kMaxNodes + 1 : 0) == 0 ? 0 : errno;
}

}  // namespace

int set_memory_policy(MemoryPolicy policy, const int* nodes, int count) {
  if (policy == MemoryPolicy::local) return set_mode(kDefault, nullptr);
  unsigned long mask[kMaxNodes / kBitsPerWord] = {};
  for (int i = 0; i < count; ++i) {
    if (nodes[i] < 0 || nodes[i] >= kMaxNodes) return EINVAL;
    mask[nodes[i] / kBitsPerWord] |= 1ul << (nodes[i] % kBitsPerWord);
  }
  if (policy == MemoryPolicy::interleave) return set_mode(kInterleave, mask);
  if (count <= 1) return set_mode(kPreferred, mask);
  const int error = set_mode(kPreferredMany, mask);
  // An older kernel: kPreferred would use the first node alone, while the default uses that of the touching thread.
  return error == EINVAL ? set_mode(kDefault, nullptr) : error;
}

}  // namespace tilewright
