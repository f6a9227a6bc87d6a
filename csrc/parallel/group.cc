#include "parallel/group.h"

#include <chrono>
#include <thread>

#include "parallel/waiting.h"

namespace tilewright {

SharedGroup::SharedGroup(int fd, int rank, std::string name, double timeout_s)
    : name_(std::move(name)),
      segment_(std::make_unique<Segment>(fd)),
      rank_(rank),
      size_(segment_->header().num_ranks),
      slot_bytes_(segment_->header().slot_bytes),
      barrier_(*segment_, rank, name_, timeout_s) {
  if (segment_->header().seats[rank].taken.exchange(1))
    throw std::invalid_argument("group '" + name_ + "': rank " + std::to_string(rank) + " is taken already");
}

SharedGroup::Hold::Hold(SharedGroup& group, Use use, const char* what) : group_(group) {
  Use current = Use::none;
  if (!group.use_.compare_exchange_strong(current, use))
    throw CollectiveError("group '" + group.name_ + "': " + what + " while another thread of this rank is in " +
                          (current == Use::waiting ? "wait_for_post" : "a collective of it"));
  if (!group.segment_) {
    group.use_ = Use::none;
    throw CollectiveError("group '" + group.name_ + "': " + what + " after close");
  }
}

void SharedGroup::post() {
  if (rank_ != 0) throw std::invalid_argument("post: this is rank " + std::to_string(rank_) + ", only rank 0 posts");
  const Hold hold(*this, Use::call, "post");
  Header& header = segment_->header();
  if (const uint64_t failure = header.failure.load()) barrier_.throw_failure("post", failure);
  header.posts.fetch_add(1);
  ring_for_sleepers(header);
}

void SharedGroup::wait_for_post(double spin_us) {
  if (rank_ == 0) throw std::invalid_argument("wait_for_post: this is rank 0, which posts");
  if (!(spin_us >= 0 && spin_us <= 1e9))
    throw std::invalid_argument("wait_for_post: spin_us is " + std::to_string(spin_us) + ", expected 0 to 1e9");
  const Hold hold(*this, Use::waiting, "wait_for_post");
  Header& header = segment_->header();
  const auto spin = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::micro>(spin_us));
  wait_until(
      header, Clock::now() + spin, Clock::time_point::max(), [&] { return header.posts.load() != posts_seen_; },
      [&](uint64_t failure) { barrier_.throw_failure("wait_for_post", failure); });
  ++posts_seen_;
}

void SharedGroup::close() {
  const std::lock_guard lock(closing_);
  if (!segment_) return;
  const uint64_t closed = failure_of(Reason::closed, 0, 1u << rank_);
  for (Use use = Use::none; !use_.compare_exchange_strong(use, Use::call); use = Use::none) {
    if (use == Use::call) throw CollectiveError("group '" + name_ + "': closed while a collective is under way");
    fail_group(segment_->header(), closed);  // wakes the thread that waits for a post
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  fail_group(segment_->header(), closed);
  segment_.reset();
  use_ = Use::none;
}

Turn::Turn(SharedGroup& group, Call call) : group_(group), hold_(group, SharedGroup::Use::call, name_of(call.kind)) {
  group.barrier_.begin(call);
}

}  // namespace tilewright
