// Why a group is unusable, as one word that all ranks read: Header::failure.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilewright {

// A collective failed: a rank did not arrive, was lost, or called another one.
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Reason : uint64_t { none, timed_out, aborted, disagreed, interrupted, closed };

// `operation` is the number of the failed collective, if there is one; `ranks` are those that caused it, a bit each.
uint64_t failure_of(Reason reason, uint64_t operation, uint32_t ranks);

// "rank 1 did not arrive at operation 7 within 60 s; the group is broken", without the operation if it is the reader's
// own.
std::string describe_failure(uint64_t failure, uint64_t own_operation, double timeout_s);

std::string seconds(double value);  // "60 s"

}  // namespace tilewright
