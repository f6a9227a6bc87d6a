// The Python module tilewright._kernels: what the machine supports, and one function per kernel entry.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/isa.h"
#include "base/memory_policy.h"
#include "base/parallel.h"
#include "base/team.h"
#include "bindings/tensor.h"
#include "kernels/manifest.h"

namespace tilewright {
namespace {

Isa isa_named(const std::string& name) {
  std::string known;
  for (const Level& level : kLevels) {
    if (name == level.name) return level.isa;
    known = level.name + (known.empty() ? "" : ", " + known);
  }
  throw nb::value_error(("unknown ISA level '" + name + "', expected one of " + known).c_str());
}

MemoryPolicy policy_named(const std::string& name) {
  if (name == "local") return MemoryPolicy::local;
  if (name == "prefer") return MemoryPolicy::prefer;
  if (name == "interleave") return MemoryPolicy::interleave;
  throw nb::value_error(("unknown memory policy '" + name + "', expected local, prefer or interleave").c_str());
}

// <op>_<level>, and between them what is multiplied, if matrices are.
std::string kernel_name(const char* op, const KernelInfo& kernel) {
  const std::string product = kernel.product ? std::string("_") + kernel.product : "";
  return op + product + "_" + name_of(kernel.isa);
}

// {op: [(isa, kernel), ...]}, best first.
nb::dict manifest() {
  nb::dict result;
  int num_ops;
  const OpInfo* ops = all_ops(&num_ops);
  for (int i = 0; i < num_ops; ++i) {
    nb::list kernels;
    for (int j = 0; j < ops[i].num_kernels; ++j)
      kernels.append(nb::make_tuple(name_of(ops[i].kernels[j].isa), kernel_name(ops[i].op, ops[i].kernels[j])));
    result[ops[i].op] = kernels;
  }
  return result;
}

}  // namespace
}  // namespace tilewright

NB_MODULE(_kernels, m) {
  using namespace tilewright;
  // A program may end while engines are alive, and their plans with them: no leak worth a page of warnings.
  nb::set_leak_warnings(false);
  m.def("isa_levels", [] {
    std::vector<std::string> names;  // from the plainest to the best
    for (const Level& level : kLevels)
      if (machine_has(level.isa)) names.insert(names.begin(), level.name);
    return names;
  });
  m.def("active_isa", [] { return std::string(name_of(active_isa())); });
  m.def("may_use_isa", [](const std::string& name) { return may_use(isa_named(name)); });
  m.def(
      "set_max_isa",
      [](const std::optional<std::string>& name) { name ? set_max_isa(isa_named(*name)) : clear_max_isa(); },
      nb::arg("name").none());
  m.def("num_threads", &num_threads);
  m.def("work_alone", &work_alone);
  m.def("set_sleeps_soon", &set_sleeps_soon);
  m.def("set_num_threads", [](int count) {
    if (count < 0) throw nb::value_error(("num_threads is " + std::to_string(count) + ", expected 0 or more").c_str());
    set_num_threads(count);
  });
  m.def("bind_threads", [](const std::vector<int>& cpus) { bind_threads(cpus.data(), static_cast<int>(cpus.size())); });
  m.def("set_memory_policy", [](const std::string& policy, const std::vector<int>& nodes) {
    return set_memory_policy(policy_named(policy), nodes.data(), static_cast<int>(nodes.size()));
  });
  m.def("manifest", &manifest);
  bind_attention(m);
  bind_linear(m);
  bind_moe(m);
  bind_gated_delta(m);
  bind_conv(m);
  bind_conv3d(m);
  bind_norm(m);
  bind_group_norm(m);
  bind_ada_norm(m);
  bind_activation(m);
  bind_embedding(m);
  bind_rope(m);
  bind_probe(m);
  bind_image(m);
  bind_mel(m);
  bind_sample(m);
  bind_collective(m);
  bind_plan(m);
}
