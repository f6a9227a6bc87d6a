// A step of a model as the list of its kernel calls: recorded once, replayed in one native call.
//
// A decode step is some 300 calls of microseconds each, and getting from Python to a kernel costs some 15: for a
// small model nearly as much as reading its weights. A call is a kernel and a plain struct of pointers and sizes, so
// that a copy of both is all there is to a recording. What lies behind the pointers may change between replays, the
// sizes may not. Where numbers behind them say which memory is read or written, the call's check (bindings/checks.h) is
// recorded too.
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

  // Kernel calls of this thread are added from now on, and run as always.
  void begin();
  void end();

  template <class Args>
  void add(void (*kernel)(const Args&), const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>, "a recorded call outlives what its arguments own");
    calls_.emplace_back([kernel, args] { kernel(args); });
  }
  // A check of numbers that a step is given runs before the first call of a replay, so that a step that fails has
  // changed nothing; once, however many calls ask for it: the layers of a model read the same tables.
  template <class Check>
  void check_at_start(const Check& check) {
    static_assert(std::is_trivially_copyable_v<Check>, "a recorded check outlives what its arguments own");
    for (const auto& [known, run] : checks_)
      if (const Check* same = std::any_cast<Check>(&known); same && *same == check) return;
    checks_.emplace_back(check, [check] { check.run(); });
  }
  // One of numbers that earlier calls may have made runs where the next call stands.
  template <class Check>
  void check_in_place(const Check& check) {
    static_assert(std::is_trivially_copyable_v<Check>, "a recorded check outlives what its arguments own");
    calls_.emplace_back([check] { check.run(); });
    ++num_checks_;
  }
  // The memory of a tensor stays as long as the plan: its capsule holds the tensor.
  void keep(nanobind::handle capsule) { kept_.push_back(nanobind::borrow(capsule)); }
  // So do numbers that a binding made for the call.
  void keep(std::vector<float> numbers) { numbers_.push_back(std::move(numbers)); }

  // In one parallel region (base/parallel.h), unless each call is to wake the team for itself: what a measurement
  // compares.
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
