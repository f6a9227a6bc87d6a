#include "kernels/probe/probe.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/tensor.h"

namespace tilewright {
namespace {

MultiplyType multiply_type_named(const std::string& name) {
  if (name == "fp32") return MultiplyType::fp32;
  if (name == "bf16") return MultiplyType::bf16;
  if (name == "int8") return MultiplyType::int8;
  throw nb::value_error(("multiply_peak: type is '" + name + "', expected fp32, bf16 or int8").c_str());
}

void require_positive(const char* name, int64_t value) {
  if (value < 1)
    throw nb::value_error((std::string(name) + " is " + std::to_string(value) + ", expected 1 or more").c_str());
}

}  // namespace

void bind_probe(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "read_bandwidth",
      [](int64_t size_bytes, const std::vector<int>& worker_counts, double seconds) {
        require_positive("read_bandwidth: size_bytes", size_bytes);
        require_positive("read_bandwidth: the number of worker counts", static_cast<int64_t>(worker_counts.size()));
        for (int workers : worker_counts) require_positive("read_bandwidth: a worker count", workers);
        nb::gil_scoped_release release;
        return read_bandwidth(size_bytes, worker_counts, seconds);
      },
      "size_bytes"_a, "worker_counts"_a, "seconds"_a);
  m.def(
      "multiply_peak",
      [](const std::string& type, int num_workers, double seconds) {
        const MultiplyType multiply_type = multiply_type_named(type);
        require_positive("multiply_peak: num_workers", num_workers);
        nb::gil_scoped_release release;
        return multiply_peak(multiply_type, num_workers, seconds);
      },
      "type"_a, "num_workers"_a, "seconds"_a);
}

}  // namespace tilewright
