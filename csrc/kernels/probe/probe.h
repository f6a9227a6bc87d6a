// The best speed of this machine, with which measured speeds are compared.
//
//   read_bandwidth  bytes per second when every worker streams its own part of a buffer too large for the caches
//   multiply_peak   operations per second (a multiply-add is two) of the best multiply unit of the ISA level, with
//                   operands that stay in registers
#pragma once

#include <cstdint>
#include <vector>

namespace tilewright {

// Returns one list per entry of `worker_counts`: the bytes per second of each slice of a buffer of `size_bytes`. The
// counts read the whole buffer in turn, for about `seconds` in all and at least once each. Throws std::bad_alloc.
std::vector<std::vector<double>> read_bandwidth(int64_t size_bytes, const std::vector<int>& worker_counts,
                                                double seconds);

enum class MultiplyType : int { fp32, bf16, int8 };

// Returns operations per second of each pass, all workers together, for about `seconds`.
std::vector<double> multiply_peak(MultiplyType type, int num_workers, double seconds);

// Runs `rounds` rounds, writes a value that depends on all of them, and returns the number of operations.
using MultiplyLoop = int64_t (*)(int64_t rounds, float* sink);

struct ProbeKernels {
  float (*sum)(const float* values, int64_t count);
  // A type without a unit at this level runs on the unit that kernels fall back to.
  MultiplyLoop fp32, bf16, int8;
};

// The active kernels, for the tests.
const ProbeKernels& probe_kernels();

}  // namespace tilewright
