// Barriers at which the ranks of a group wait for each other in a collective.
//
// Barriers are numbered, the same on all ranks. Between barriers n - 1 and n a rank writes into its slot of parity
// n % 2 and reads everybody's slots of parity (n - 1) % 2: what it reads was finished before barrier n - 1, and what it
// overwrites was last read before barrier n - 1. docs/parallel.md has the argument.
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "parallel/failure.h"
#include "parallel/segment.h"

namespace tilewright {

// The collective that a rank calls; all must call the same.
struct Call {
  enum Kind : uint8_t { all_reduce, all_gather, reduce_scatter, broadcast, barrier, all_reduce_add, all_reduce_norm };
  Kind kind = barrier;
  DType dtype = DType::u8;
  int root = 0;
  int64_t count = 0;
  DType out_dtype = dtype;

  uint64_t bits() const;
  static std::string describe(uint64_t bits);  // "all_reduce of 4096 bfloat16"
};

const char* name_of(Call::Kind kind);

// Tells all ranks that one is gone: waiting ranks fail at once, the others at their next call. For a launcher that sees
// its child die.
void abort_group(Segment& segment, int rank);

class Barrier {
 public:
  Barrier(Segment& segment, int rank, std::string name, double timeout_s);

  // Begins a collective, which errors refer to from here on. Throws if the group has failed before.
  void begin(Call call);
  // Waits for all others at the next barrier. Throws CollectiveError naming those that did not arrive within the
  // timeout; the group has then failed for all, as it has if a signal handler throws.
  void pass();

  // The parity of the slots that may be written, and that may be read, until the next barrier.
  uint32_t written_parity() const { return (number_ + 1) % 2; }
  uint32_t read_parity() const { return number_ % 2; }

  // Throws CollectiveError "group 'tp', <what>: <why the group has failed>".
  [[noreturn]] void throw_failure(const std::string& what, uint64_t failure) const;

 private:
  uint32_t missing(uint32_t number) const;  // ranks, a bit each
  void wait(uint32_t number);
  void check_calls(uint32_t number);
  std::string operation() const;  // "all_reduce, operation 17"

  Header& header_;
  int rank_, num_ranks_;
  std::string name_;
  double timeout_s_;
  uint32_t number_ = 0;      // of the last barrier passed
  uint64_t operations_ = 0;  // collectives begun, counting this one
  Call call_;
};

}  // namespace tilewright
