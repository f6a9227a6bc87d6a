// One rank's end of a group, and the passage of a message through its slots.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/parallel.h"
#include "parallel/barrier.h"
#include "parallel/segment.h"

namespace tilewright {

// Among the best of the sizes from 64 KB to 4 MB (docs/parallel.md): both slots of a rank, and what it reads of others,
// stay in its second-level cache.
inline constexpr int64_t kDefaultSlotBytes = int64_t{256} << 10;

// Used by one thread at a time; another may close it while that one waits for a post.
class SharedGroup {
 public:
  // Maps the memory behind `fd` (Segment::create), which may be closed afterwards.
  SharedGroup(int fd, int rank, std::string name, double timeout_s);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t slot_bytes() const { return slot_bytes_; }

  // On rank 0: there is work. Each other rank returns from wait_for_post once more.
  void post();
  // Waits until rank 0 has posted once more than this rank has seen, however long that takes. Spins for `spin_us`
  // before it sleeps. Throws CollectiveError if the group has failed or is closed.
  void wait_for_post(double spin_us);

  // Frees the memory; later calls throw CollectiveError. The other ranks are notified instead of waiting in vain.
  void close();

 private:
  friend class Turn;
  enum class Use { none, call, waiting };

  // Excludes other threads of the rank during its lifetime.
  class Hold {
   public:
    Hold(SharedGroup& group, Use use, const char* what);
    ~Hold() { group_.use_ = Use::none; }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    SharedGroup& group_;
  };

  std::string name_;
  std::unique_ptr<Segment> segment_;
  int rank_, size_;
  int64_t slot_bytes_;
  Barrier barrier_;
  uint32_t posts_seen_ = 0;
  std::atomic<Use> use_{Use::none};
  std::mutex closing_;
};

// One collective, from its first barrier to its last.
class Turn {
 public:
  Turn(SharedGroup& group, Call call);

  int rank() const { return group_.rank_; }
  int size() const { return group_.size_; }
  int64_t slot_bytes() const { return group_.slot_bytes_; }
  // The slot that this rank may write until the next barrier, and those that it may read until then.
  char* own_slot() const { return group_.segment_->slot(rank(), group_.barrier_.written_parity()); }
  const char* slot_of(int rank) const { return group_.segment_->slot(rank, group_.barrier_.read_parity()); }

  void pass_barrier() { group_.barrier_.pass(); }

  // Takes chunks through the stages of a collective, one stage per window between two barriers: while chunk i is in
  // stage 0, chunk i - 1 is in stage 1 and so on. Within a window nothing depends on anything else, so that the team
  // shares all of it. `Stages` has
  //
  //   kStages                           how many there are; what stage k leaves in slots, stage k + 1 reads
  //   num_chunks()
  //   num_items(stage, chunk)           items of work, 0 where the rank has no part in it
  //   item_bytes(stage)
  //   work(stage, chunk, begin, end)    does those items
  template <class Stages>
  void run(const Stages& stages) {
    const int64_t num_windows = stages.num_chunks() + Stages::kStages - 1;
    for (int64_t window = 0; window < num_windows; ++window) {
      if (window) pass_barrier();
      share_window(stages, window);
    }
  }

 private:
  // Bytes per task of a team: enough that handing it out costs little, and one task for a message of 8 KB.
  static constexpr int64_t kTaskBytes = 32 << 10;

  template <class Stages>
  void share_window(const Stages& stages, int64_t window) {
    int64_t items[Stages::kStages], grain[Stages::kStages], end_task[Stages::kStages];
    int64_t num_tasks = 0;
    // The latest stage first: its data has waited longest, and what is written last is still in our cache for others.
    for (int stage = Stages::kStages - 1; stage >= 0; --stage) {
      const int64_t chunk = window - stage;
      items[stage] = chunk >= 0 && chunk < stages.num_chunks() ? stages.num_items(stage, chunk) : 0;
      grain[stage] = kTaskBytes / stages.item_bytes(stage) + 1;
      end_task[stage] = num_tasks += (items[stage] + grain[stage] - 1) / grain[stage];
    }
    parallel_for(num_tasks, [&](int64_t task) {
      int stage = Stages::kStages - 1;
      while (task >= end_task[stage]) --stage;
      const int64_t begin = (task - (stage + 1 < Stages::kStages ? end_task[stage + 1] : 0)) * grain[stage];
      const int64_t end = begin + grain[stage] < items[stage] ? begin + grain[stage] : items[stage];
      stages.work(stage, window - stage, begin, end);
    });
  }

  SharedGroup& group_;
  SharedGroup::Hold hold_;
};

}  // namespace tilewright
