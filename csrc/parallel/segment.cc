#include "parallel/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace tilewright {
namespace {

constexpr uint64_t kMagic = 0x32726f6f6d746874;  // changes with the layout: ranks of two versions must not meet
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHeaderBytes = (static_cast<int64_t>(sizeof(Header)) + kPageBytes - 1) / kPageBytes * kPageBytes;

int64_t total_bytes(int num_ranks, int64_t slot_bytes) { return kHeaderBytes + num_ranks * 2 * slot_bytes; }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Initialises a new file: its final size, and the header.
void lay_out(int fd, int num_ranks, int64_t slot_bytes) {
  if (ftruncate(fd, total_bytes(num_ranks, slot_bytes)) != 0) fail("shared memory of a group: ftruncate");
  // If a process shrank the file, the others would crash at their next access.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("shared memory of a group: seals");
  void* memory = mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) fail("shared memory of a group: mmap");
  auto* header = new (memory) Header{};
  header->num_ranks = num_ranks;
  header->slot_bytes = slot_bytes;
  header->magic = kMagic;
  munmap(memory, kHeaderBytes);
}

}  // namespace

int Segment::create(int num_ranks, int64_t slot_bytes) {
  if (num_ranks < 1 || num_ranks > kMaxRanks)
    throw std::invalid_argument("a group has " + std::to_string(num_ranks) + " ranks, expected 1 to " +
                                std::to_string(kMaxRanks));
  if (slot_bytes < kPageBytes || slot_bytes % kPageBytes || slot_bytes > (int64_t{1} << 30))
    throw std::invalid_argument("slot_bytes is " + std::to_string(slot_bytes) +
                                ", expected a multiple of 4096 up to 2^30");
  const int fd = memfd_create("tilewright_group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("shared memory of a group: memfd_create");
  try {
    lay_out(fd, num_ranks, slot_bytes);
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

Segment::Segment(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) fail("shared memory of a group: fstat");
  size_bytes_ = status.st_size;
  void* memory = size_bytes_ < kHeaderBytes
                     ? MAP_FAILED
                     : mmap(nullptr, static_cast<size_t>(size_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (size_bytes_ >= kHeaderBytes && memory == MAP_FAILED) fail("shared memory of a group: mmap");
  memory_ = static_cast<char*>(memory);
  if (memory == MAP_FAILED || header().magic != kMagic ||
      size_bytes_ != total_bytes(header().num_ranks, header().slot_bytes)) {
    if (memory != MAP_FAILED) munmap(memory, static_cast<size_t>(size_bytes_));
    throw std::invalid_argument("descriptor " + std::to_string(fd) + " is not the shared memory of a group");
  }
}

Segment::~Segment() { munmap(memory_, static_cast<size_t>(size_bytes_)); }

char* Segment::slot(int rank, uint32_t parity) const {
  return memory_ + kHeaderBytes + (2 * rank + static_cast<int>(parity)) * header().slot_bytes;
}

}  // namespace tilewright
