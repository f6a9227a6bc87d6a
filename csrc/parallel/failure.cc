#include "parallel/failure.h"

#include <cstdio>

#include "parallel/segment.h"

namespace tilewright {
namespace {

// From the highest bit on: the reason, the low bits of the operation's number, the ranks.
constexpr int kReasonShift = 60, kOperationShift = 32;

// Returns the number of the failed operation, for a reader whose own is less than 2^27 away.
uint64_t operation_of(uint64_t failure, uint64_t own) {
  const auto distance = static_cast<int64_t>(((failure >> kOperationShift) - own) << 36) >> 36;
  return own + static_cast<uint64_t>(distance);
}

// "rank 1", "ranks 0, 2 and 3"
std::string list_of(uint32_t ranks) {
  std::string text;
  int remaining = __builtin_popcount(ranks);
  const char* noun = remaining == 1 ? "rank " : "ranks ";
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    text += (text.empty() ? noun : remaining == 1 ? " and " : ", ") + std::to_string(rank);
    --remaining;
  }
  return text;
}

}  // namespace

uint64_t failure_of(Reason reason, uint64_t operation, uint32_t ranks) {
  return static_cast<uint64_t>(reason) << kReasonShift | (operation << 36 >> 36) << kOperationShift | ranks;
}

std::string describe_failure(uint64_t failure, uint64_t own_operation, double timeout_s) {
  const std::string ranks = list_of(static_cast<uint32_t>(failure));
  const uint64_t number = operation_of(failure, own_operation);
  const std::string where = number == own_operation ? "" : " at operation " + std::to_string(number);
  const char* broken = "; the group is broken";
  switch (static_cast<Reason>(failure >> kReasonShift)) {
    case Reason::timed_out: return ranks + " did not arrive" + where + " within " + seconds(timeout_s) + broken;
    case Reason::aborted: return ranks + " was lost" + broken;
    case Reason::interrupted: return ranks + " was interrupted" + where + broken;
    case Reason::closed: return ranks + " has closed the group";
    default: return ranks + " did not come for the same" + where + broken;
  }
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", value);
  return text;
}

}  // namespace tilewright
