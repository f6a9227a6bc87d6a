// A step of a model as the list of its kernel calls: recorded once, replayed in one native call. A decode step is some
// 300 calls of microseconds each, and getting from Python to a kernel takes some 15: for a small model nearly as long
// as reading its weights. A call is a kernel and a plain struct of pointers and sizes, so a recording is a copy of
// both. The data behind the pointers may change between replays, the sizes may not. If data selects which memory is
// accessed, the call's check (bindings/checks.h) is recorded too.
#pragma once

#include <nanobind/nanobind.h>

#include <any>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace tilewright {

class Plan {
 public:
  // The plan this thread is recording, or null.
  static Plan* recording();

  // Records this thread's kernel calls from now on; they run as always.
  void begin();
  void end();

  template <class Args>
  void add(void (*kernel)(const Args&), const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>, "a recorded call outlives what its arguments own");
    calls_.emplace_back([kernel, args] { kernel(args); });
  }
  // Runs a check of a step's inputs before the first call of a replay, so that a step that fails has changed nothing;
  // once, however many calls register it: the layers of a model read the same tables.
  template <class Check>
  void check_at_start(const Check& check) {
    static_assert(std::is_trivially_copyable_v<Check>, "a recorded check outlives what its arguments own");
    for (const auto& [known, run] : checks_)
      if (const Check* same = std::any_cast<Check>(&known); same && *same == check) return;
    checks_.emplace_back(check, [check] { check.run(); });
  }
  // Runs a check of numbers that earlier calls may compute just before the next call.
  template <class Check>
  void check_in_place(const Check& check) {
    static_assert(std::is_trivially_copyable_v<Check>, "a recorded check outlives what its arguments own");
    calls_.emplace_back([check] { check.run(); });
    ++num_checks_;
  }
  // Keeps the memory of a tensor as long as the plan: its capsule holds the tensor.
  void keep(nanobind::handle capsule) { kept_.push_back(nanobind::borrow(capsule)); }
  // Keeps numbers that a binding computed for the call.
  void keep(std::vector<float> numbers) { numbers_.push_back(std::move(numbers)); }

  // Replays in one parallel region (base/parallel.h), or wakes the team for each call, for a measurement to compare.
  void replay(bool in_one_region) const;
  size_t num_calls() const { return calls_.size() - num_checks_; }

 private:
  std::vector<std::pair<std::any, std::function<void()>>> checks_;
  std::vector<std::function<void()>> calls_;  // and checks in place
  size_t num_checks_ = 0;                     // of those
  std::vector<nanobind::object> kept_;
  std::vector<std::vector<float>> numbers_;
};

}  // namespace tilewright
