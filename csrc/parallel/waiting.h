// How a rank waits for another: it spins for a while, then sleeps on the header's bell, a shared futex.
//
// No wake-up is lost. A sleeper counts itself, reads the bell, then checks once more; a rank that changes something
// others wait for stores it, then reads the count (ring_for_sleepers). All four are sequentially consistent: either the
// sleeper sees the change, or the other sees the sleeper. A bell rung after it was read prevents falling asleep.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/arch.h"
#include "parallel/segment.h"

namespace tilewright {

using Clock = std::chrono::steady_clock;

// Wakes sleepers, if there are any: call it after a store that they may wait for.
void ring_for_sleepers(Header& header);

// Records the first failure, and wakes all waiting ranks.
void fail_group(Header& header, uint64_t failure);

// Sets a function that a rank runs when a signal has woken it, and every 100 ms of sleep, for signals that another
// thread received: Python's handlers, which run on no other thread. If it throws, the wait ends.
void set_signal_check(void (*check)());

// Sleeps once, until the bell differs from `bell`, for at most `left`.
void sleep_on_bell(Header& header, uint32_t bell, std::chrono::nanoseconds left);

// Counts this rank among the sleepers during its lifetime.
class Sleeper {
 public:
  explicit Sleeper(Header& header) : header_(header) { header_.sleepers.fetch_add(1); }
  ~Sleeper() { header_.sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Header& header_;
};

// True once done() holds, polled until `spin_until` and slept for afterwards; false from `until` on. If the group has
// failed, failed(failure) throws. The failure is read first and done() checked last: what is done stays done, whatever
// happened since.
template <class Done, class Failed>
bool wait_until(Header& header, Clock::time_point spin_until, Clock::time_point until, Done done, Failed failed) {
  do {
    const uint64_t failure = header.failure.load();
    for (int looks = 0; looks < 16; ++looks) {
      if (done()) return true;
      pause_cpu();
    }
    if (failure) failed(failure);
  } while (Clock::now() < spin_until);

  const Sleeper counted(header);
  for (;;) {
    const uint32_t bell = header.bell.load();
    const uint64_t failure = header.failure.load();
    if (done()) return true;
    if (failure) failed(failure);
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now());
    if (left.count() <= 0) return false;
    sleep_on_bell(header, bell, left);
  }
}

}  // namespace tilewright
