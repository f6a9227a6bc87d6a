// The probes compute what they claim to, so that they time what they name.
#include <cmath>

#include "kernels/probe/probe.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

TEST(sum_reads_every_value_once) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t count : {0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 1000, 4099}) {
        GuardedBuffer<float> values(count, edge);
        float expected = 0;
        for (int64_t i = 0; i < count; ++i) expected += values[i] = static_cast<float>(i % 5 + 1);
        CHECK(probe_kernels().sum(values.data(), count) == expected);  // small whole numbers: exact in any order
      }
  });
}

TEST(multiply_loops_run_every_round) {
  for_each_isa([] {
    const ProbeKernels& kernels = probe_kernels();
    for (MultiplyLoop loop : {kernels.fp32, kernels.bf16, kernels.int8}) {
      float none = NAN, one = NAN, many = NAN;
      CHECK(loop(0, &none) == 0);
      const int64_t operations = loop(1, &one);
      CHECK(operations > 0);
      CHECK(loop(100, &many) == 100 * operations);
      CHECK(std::isfinite(none) && std::isfinite(one) && std::isfinite(many));
      CHECK(one != none && many != one);
    }
  });
}

TEST(rates_are_positive) {
  for_each_isa([] {
    const auto reads = read_bandwidth((40 << 20) + 12, {2, 1}, 0.0);  // one slice of two workers, two of one
    CHECK(reads.size() == 2 && reads[0].size() == 1 && reads[1].size() == 2);
    for (const auto& passes : reads)
      for (double rate : passes) CHECK(rate > 0);
    for (MultiplyType type : {MultiplyType::fp32, MultiplyType::bf16, MultiplyType::int8})
      for (double rate : multiply_peak(type, 2, 0.0)) CHECK(rate > 0);
  });
}

}  // namespace
}  // namespace tilewright::testing
