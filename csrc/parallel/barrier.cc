#include "parallel/barrier.h"

#include <algorithm>

#include "parallel/waiting.h"

namespace tilewright {
namespace {

// Up to this delay of a rank, spinning costs less than sleeping: falling asleep and being woken take some 10 us here
// and up to 50 on a busy machine, and ranks of one model are seldom further apart.
constexpr std::chrono::microseconds kSpin{50};

constexpr int kCountShift = 24, kRootShift = 16, kOutShift = 12, kDTypeShift = 8;

}  // namespace

const char* name_of(Call::Kind kind) {
  constexpr const char* kNames[] = {"all_reduce", "all_gather",     "reduce_scatter", "broadcast",
                                    "barrier",    "all_reduce_add", "all_reduce_norm"};
  return kNames[kind];
}

uint64_t Call::bits() const {
  return static_cast<uint64_t>(count) << kCountShift | static_cast<uint64_t>(root) << kRootShift |
         static_cast<uint64_t>(out_dtype) << kOutShift | static_cast<uint64_t>(dtype) << kDTypeShift | kind;
}

std::string Call::describe(uint64_t bits) {
  const auto kind = static_cast<Kind>(bits & 0xff);
  std::string text = name_of(kind);
  if (kind == barrier) return text;
  const auto dtype = static_cast<DType>(bits >> kDTypeShift & 0xf),
             out_dtype = static_cast<DType>(bits >> kOutShift & 0xf);
  text += " of " + std::to_string(bits >> kCountShift) + " " + name_of(dtype);
  if (out_dtype != dtype) text += std::string(" into ") + name_of(out_dtype);
  if (kind == broadcast) text += " from rank " + std::to_string(bits >> kRootShift & 0xff);
  return text;
}

void abort_group(Segment& segment, int rank) {
  if (rank < 0 || rank >= segment.header().num_ranks)
    throw std::invalid_argument("abort: rank is " + std::to_string(rank) + ", expected 0 to " +
                                std::to_string(segment.header().num_ranks - 1));
  fail_group(segment.header(), failure_of(Reason::aborted, 0, 1u << rank));
}

Barrier::Barrier(Segment& segment, int rank, std::string name, double timeout_s)
    : header_(segment.header()),
      rank_(rank),
      num_ranks_(header_.num_ranks),
      name_(std::move(name)),
      timeout_s_(timeout_s) {
  if (rank < 0 || rank >= num_ranks_)
    throw std::invalid_argument("rank is " + std::to_string(rank) + ", expected 0 to " +
                                std::to_string(num_ranks_ - 1));
  if (!(timeout_s > 0 && timeout_s <= 1e6))
    throw std::invalid_argument("timeout_s is " + seconds(timeout_s) + ", expected more than 0 and at most 1e6");
  number_ = header_.seats[rank].arrived.load();
}

// Before the first slot is written: others may still read its contents.
void Barrier::begin(Call call) {
  call_ = call;
  ++operations_;
  if (const uint64_t failure = header_.failure.load()) throw_failure(operation(), failure);
}

void Barrier::pass() {
  if (const uint64_t failure = header_.failure.load()) throw_failure(operation(), failure);
  const uint32_t number = number_ + 1;
  Seat& seat = header_.seats[rank_];
  seat.calls[number % 2].store(call_.bits(), std::memory_order_relaxed);
  // Sequentially consistent, as are the loads in missing() and the count of sleepers: the last rank in that order to
  // reach a barrier sees all others there, and all sleepers, and rings.
  seat.arrived.store(number);
  if (missing(number))
    wait(number);
  else
    ring_for_sleepers(header_);
  number_ = number;
  check_calls(number);
}

uint32_t Barrier::missing(uint32_t number) const {
  uint32_t ranks = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const uint32_t ahead = header_.seats[rank].arrived.load() - number;
    if (static_cast<int32_t>(ahead) < 0) ranks |= 1u << rank;  // numbers wrap around
  }
  return ranks;
}

void Barrier::wait(uint32_t number) {
  const auto began = Clock::now();
  const auto timeout = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  const auto all_here = [&] { return missing(number) == 0; };
  const auto failed = [&](uint64_t failure) { throw_failure(operation(), failure); };
  try {
    if (wait_until(header_, began + std::min<Clock::duration>(kSpin, timeout), began + timeout, all_here, failed))
      return;
  } catch (const CollectiveError&) {
    throw;
  } catch (...) {  // raised by a signal handler: the others would wait for the rest of this collective
    fail_group(header_, failure_of(Reason::interrupted, operations_, 1u << rank_));
    throw;
  }
  const uint32_t absent = missing(number);
  if (!absent) return;
  fail_group(header_, failure_of(Reason::timed_out, operations_, absent));
  throw_failure(operation(), header_.failure.load());
}

// All are here; do their calls agree? Seats of this parity are written again only after the next barrier.
void Barrier::check_calls(uint32_t number) {
  const uint64_t mine = call_.bits();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const uint64_t theirs = header_.seats[rank].calls[number % 2].load(std::memory_order_relaxed);
    if (theirs == mine) continue;
    fail_group(header_, failure_of(Reason::disagreed, operations_, 1u << rank | 1u << rank_));
    throw CollectiveError("group '" + name_ + "', " + operation() + ": rank " + std::to_string(rank) + " came for " +
                          Call::describe(theirs) + ", rank " + std::to_string(rank_) + " for " + Call::describe(mine) +
                          "; the group is broken");
  }
}

void Barrier::throw_failure(const std::string& what, uint64_t failure) const {
  throw CollectiveError("group '" + name_ + "', " + what + ": " + describe_failure(failure, operations_, timeout_s_));
}

std::string Barrier::operation() const {
  return std::string(name_of(call_.kind)) + ", operation " + std::to_string(operations_);
}

}  // namespace tilewright
