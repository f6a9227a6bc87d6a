// Threads that stay together for a while: one leads, the others wait for its tasks. Handing out tasks is one store,
// taking one an addition. Both are on the ticket, a word with the number of tasks and that of the next: a thread that
// adds one and gets a number below the count owns that task, of the tasks handed out last. A late thread finds none
// left. The leader waits for tasks to be done, not for threads to arrive: a thread that the system has taken off its
// core delays nobody unless it owns a task.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>

namespace tilewright {

// Whether idle threads sleep almost at once, so that other processes get their cores (config.py reads OMP_WAIT_POLICY).
// Otherwise they spin first.
void set_sleeps_soon(bool value);
bool sleeps_soon();

using TaskBody = void (*)(void* context, int64_t task);

class Team {
 public:
  // A waiting thread spins for `patience`; then it yields its core.
  explicit Team(std::chrono::microseconds patience) : patience_(patience) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Called by the leader: runs body(context, task) for every task in [0, count) on all free threads of the team, itself
  // included, and returns when all are done. After a task that throws no other begins, and the first exception is
  // rethrown here; the team stays usable. Tasks must not call this.
  void run(int64_t count, TaskBody body, void* context);

  // The leader's last call: the others return from `work`.
  void dismiss();

  // Runs on every other thread until then.
  void work();

  // The parts of `run`, for a team that comes together for one call: tasks are handed out, every thread runs some until
  // none is left, and the leader waits until all are done, or throws.
  void hand_out(int64_t count, TaskBody body, void* context);
  void take_tasks();
  void finish();

 private:
  static constexpr int64_t kMaxTasks = int64_t{1} << 30;
  static constexpr int kLooks = 16;  // polls of a word between two of the clock

  struct Ticket {
    uint32_t next = 1, count = 0;  // no task left
    bool has_task() const { return next < count; }
  };
  // Two numbers in one word, so that one addition takes a task and shows whether there is one: `next` is the lower
  // half.
  static uint64_t to_bits(Ticket ticket) { return uint64_t{ticket.count} << 32 | ticket.next; }
  static Ticket from_bits(uint64_t bits) { return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}; }
  static constexpr uint32_t kDismissed = 1u << 31;  // as `next`: above any number that late threads can add up to

  Ticket wait_for_ticket();
  void wait_until_done() const;

  const std::chrono::microseconds patience_;
  // Two cache lines each, since processors fetch lines in pairs. All that the leader writes is in one of them.
  alignas(128) std::atomic<uint64_t> ticket_{to_bits({})};
  TaskBody body_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> has_failed_{false};
  alignas(128) std::atomic<int64_t> num_done_{0};
  int64_t count_ = 0;           // the leader's own
  std::exception_ptr failure_;  // of the thread that set has_failed_
};

}  // namespace tilewright
