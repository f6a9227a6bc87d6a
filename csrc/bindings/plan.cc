#include "bindings/plan.h"

#include "base/parallel.h"
#include "bindings/tensor.h"

namespace tilewright {
namespace {

thread_local Plan* recording_plan = nullptr;

}  // namespace

Plan* Plan::recording() { return recording_plan; }

void Plan::begin() {
  if (recording_plan) throw nb::value_error("plan: this thread is recording already");
  if (!calls_.empty()) throw nb::value_error("plan: recorded already");
  recording_plan = this;
}

void Plan::end() {
  if (recording_plan != this) throw nb::value_error("plan: not being recorded by this thread");
  recording_plan = nullptr;
}

void Plan::replay(bool in_one_region) const {
  if (recording_plan) throw nb::value_error("plan: replayed while this thread is recording");
  nb::gil_scoped_release release;
  for (const auto& [check, run] : checks_) run();
  auto make_calls = [&] {
    for (const auto& call : calls_) call();
  };
  in_one_region ? parallel_region(make_calls) : make_calls();
}

void bind_plan(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Plan>(m, "Plan")
      .def(nb::init<>())
      .def("begin", &Plan::begin)
      .def("end", &Plan::end)
      .def("replay", &Plan::replay, "in_one_region"_a = true)
      .def_prop_ro("num_calls", &Plan::num_calls);
}

}  // namespace tilewright
