// The memory that the ranks of a group share: one anonymous file (memfd), mapped by each of them.
//
//   page 0    Header: who the group is, the bell that sleepers wait for, why it failed; a Seat per rank
//   then      for each rank two slots of slot_bytes, written by that rank and read by all
//
// It has no name anywhere: when the last process that maps it ends, however it ends, the kernel frees it.
#pragma once

#include <atomic>
#include <cstdint>

namespace tilewright {

inline constexpr int kMaxRanks = 32;

// Only lock-free words work between processes: a lock would belong to one process.
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// One rank's messages to the others. Two lines: hardware fetches lines in pairs, and a neighbour's writes would evict
// ours.
struct alignas(128) Seat {
  std::atomic<uint32_t> taken;     // 1 once a process is this rank
  std::atomic<uint32_t> arrived;   // the number of the last barrier this rank came to
  std::atomic<uint64_t> calls[2];  // by the barrier's parity: which collective it came for (Call::bits)
};

struct Header {
  uint64_t magic;
  int32_t num_ranks;
  int64_t slot_bytes;
  // Zero, or why the group is unusable; the first writer wins. See failure.h.
  alignas(128) std::atomic<uint64_t> failure;
  // Waiters that stopped spinning sleep on `bell`; it is incremented and woken only if there are sleepers.
  alignas(128) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
  // Number of posts of rank 0: others wait for it to change.
  alignas(128) std::atomic<uint32_t> posts;
  Seat seats[kMaxRanks];
};

class Segment {
 public:
  // Creates memory for `num_ranks` ranks and returns its descriptor. Its size is fixed; it is closed on exec unless it
  // is passed on. Throws std::system_error if the system has no memfd.
  static int create(int num_ranks, int64_t slot_bytes);

  // Maps it; the descriptor may be closed afterwards. Throws std::invalid_argument if it is no segment.
  explicit Segment(int fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  char* slot(int rank, uint32_t parity) const;

 private:
  char* memory_;
  int64_t size_bytes_;
};

}  // namespace tilewright
