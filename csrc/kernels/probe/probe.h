// What this machine can do at best, the scale that every measured speed is held against.
//
//   read_bandwidth  bytes per second when every worker streams its own part of a buffer too large for the caches
//   multiply_peak   operations per second (a multiply-add is two) of the best multiply unit of the ISA level, with
//                   operands that stay in registers
#pragma once

#include <cstdint>
#include <vector>

namespace tilewright {

// One list per entry of `worker_counts`: the bytes per second of each pass over a buffer of `size_bytes`. Passes of
// the counts alternate, for about `seconds` in all and at least three each. Throws std::bad_alloc.
std::vector<std::vector<double>> read_bandwidth(int64_t size_bytes, const std::vector<int>& worker_counts,
                                                double seconds);

enum class MultiplyType : int { fp32, bf16, int8 };

// Operations per second of each pass, all workers together, for about `seconds`.
std::vector<double> multiply_peak(MultiplyType type, int num_workers, double seconds);

// Runs `rounds` rounds, writes a value that depends on all of them, and returns how many operations that was.
using MultiplyLoop = int64_t (*)(int64_t rounds, float* sink);

struct ProbeKernels {
  float (*sum)(const float* values, int64_t count);
  // A type the level has no unit for runs on the unit a kernel would fall back to.
  MultiplyLoop fp32, bf16, int8;
};

// The kernels in use, for the tests.
const ProbeKernels& probe_kernels();

}  // namespace tilewright
