// Why a group can no longer be used, as one word that all ranks read: Header::failure.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilewright {

// A collective that did not take place: a rank did not come, was lost, or came for another one.
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Reason : uint64_t { none, timed_out, aborted, disagreed, interrupted, closed };

// `operation` is the number of the collective that failed, where one did; `ranks` are those it failed for, a bit each.
uint64_t failure_of(Reason reason, uint64_t operation, uint32_t ranks);

// "rank 1 did not arrive at operation 7 within 60 s; the group is broken". The operation is left out where it is the
// reader's own.
std::string describe_failure(uint64_t failure, uint64_t own_operation, double timeout_s);

std::string seconds(double value);  // "60 s"

}  // namespace tilewright
