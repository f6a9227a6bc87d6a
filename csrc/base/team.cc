#include "base/team.h"

#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/arch.h"

namespace tilewright {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> asked_to_sleep_soon{false};

}  // namespace

void set_sleeps_soon(bool value) { asked_to_sleep_soon.store(value, std::memory_order_relaxed); }

bool sleeps_soon() { return asked_to_sleep_soon.load(std::memory_order_relaxed); }

void Team::run(int64_t count, TaskBody body, void* context) {
  if (count <= 0) return;
  hand_out(count, body, context);
  take_tasks();
  finish();
}

void Team::hand_out(int64_t count, TaskBody body, void* context) {
  if (count > kMaxTasks) throw std::length_error("a team takes up to 2^30 tasks, not " + std::to_string(count));
  // No thread owns a task now, and only owners read these.
  body_ = body;
  context_ = context;
  count_ = count;
  num_done_.store(0, std::memory_order_relaxed);
  ticket_.exchange(to_bits({0, static_cast<uint32_t>(count)}));
  ticket_.notify_all();
}

void Team::finish() {
  wait_until_done();
  if (has_failed_.exchange(false, std::memory_order_relaxed)) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Team::dismiss() {
  ticket_.exchange(to_bits({kDismissed, 0}));
  ticket_.notify_all();
}

void Team::work() {
  while (wait_for_ticket().has_task()) take_tasks();
}

// Waits for a ticket that has a task, or that dismisses the team.
Team::Ticket Team::wait_for_ticket() {
  auto arrived = [](Ticket ticket) { return ticket.has_task() || ticket.next >= kDismissed; };
  const auto until = Clock::now() + patience_;
  do {
    for (int look = 0; look < kLooks; ++look) {
      const Ticket ticket = from_bits(ticket_.load(std::memory_order_relaxed));
      if (arrived(ticket)) return ticket;
      pause_cpu();
    }
  } while (Clock::now() < until);
  for (;;) {
    const uint64_t bits = ticket_.load();
    if (arrived(from_bits(bits))) return from_bits(bits);
    ticket_.wait(bits);
  }
}

// All tasks run here are counted at once, when none is left: the leader hands out no others before.
void Team::take_tasks() {
  int64_t num_taken = 0;
  for (;; ++num_taken) {
    const Ticket ticket = from_bits(ticket_.fetch_add(1, std::memory_order_acquire));
    if (!ticket.has_task()) break;
    if (has_failed_.load(std::memory_order_relaxed)) continue;
    try {
      body_(context_, ticket.next);
    } catch (...) {
      if (!has_failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
    }
  }
  if (num_taken) num_done_.fetch_add(num_taken, std::memory_order_release);
}

// Every owner of a task runs or could run, so this wait ends. It yields in case such a thread needs this core.
void Team::wait_until_done() const {
  const auto until = Clock::now() + patience_;
  for (bool is_patient = true;; is_patient = is_patient && Clock::now() < until) {
    for (int look = 0; look < kLooks; ++look) {
      if (num_done_.load(std::memory_order_acquire) == count_) return;
      pause_cpu();
    }
    if (!is_patient) std::this_thread::yield();
  }
}

}  // namespace tilewright
