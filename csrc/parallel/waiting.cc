#include "parallel/waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace tilewright {
namespace {

constexpr std::chrono::milliseconds kSignalCheck{100};

std::atomic<void (*)()> signal_check{nullptr};

// The futex is shared, not private: the word is identified by its place in the file, whatever its address in a process.
void ring(Header& header) {
  header.bell.fetch_add(1);
  syscall(SYS_futex, &header.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void ring_for_sleepers(Header& header) {
  if (header.sleepers.load()) ring(header);
}

void fail_group(Header& header, uint64_t failure) {
  uint64_t none = 0;
  header.failure.compare_exchange_strong(none, failure);
  ring(header);
}

void set_signal_check(void (*check)()) { signal_check = check; }

void sleep_on_bell(Header& header, uint32_t bell, std::chrono::nanoseconds left) {
  const auto timeout = std::min<std::chrono::nanoseconds>(left, kSignalCheck);
  const timespec relative{0, timeout.count()};
  syscall(SYS_futex, &header.bell, FUTEX_WAIT, bell, &relative, nullptr, 0);
  if (header.bell.load() != bell) return;
  if (auto check = signal_check.load()) check();
}

}  // namespace tilewright
