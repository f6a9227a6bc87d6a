#include "bindings/plan.h"

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

void Plan::replay() const {
  if (recording_plan) throw nb::value_error("plan: replayed while this thread is recording");
  nb::gil_scoped_release release;
  for (const auto& [check, run] : checks_) run();
  for (const auto& call : calls_) call();
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan")
      .def(nb::init<>())
      .def("begin", &Plan::begin)
      .def("end", &Plan::end)
      .def("replay", &Plan::replay)
      .def_prop_ro("num_calls", &Plan::num_calls);
}

}  // namespace tilewright
