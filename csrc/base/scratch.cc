#include "base/scratch.h"

#include <cstdlib>
#include <new>

#include <sys/mman.h>

namespace tilewright {
namespace {

class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  void* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      // Half as much again, so that slowly growing requests settle; whole huge pages for large sizes.
      const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
      const size_t size = (bytes + bytes / 2 + alignment - 1) / alignment * alignment;
      data_ = std::aligned_alloc(alignment, size);
      if (!data_) throw std::bad_alloc();
      if (alignment == kHugePage) madvise(data_, size, MADV_HUGEPAGE);
      size_ = size;
    }
    return data_;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

void* thread_scratch(size_t bytes) {
  thread_local Buffer buffer;
  return buffer.at_least(bytes);
}

void* shared_scratch(size_t bytes) {
  thread_local Buffer buffer;
  return buffer.at_least(bytes);
}

}  // namespace tilewright
