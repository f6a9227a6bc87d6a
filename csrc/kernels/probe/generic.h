// Streaming sums and register-resident multiply loops in terms of Vec. Include after a Vec.
#pragma once

#include "kernels/probe/probe.h"

namespace tilewright {
namespace {

// Independent chains: a latency of 4 to 6 cycles on two ports needs 8 to 12, and some levels have only 16 registers for
// them and their operands.
inline constexpr int kChains = 12;

// Eight accumulators of at most a cache line each: more than the latency of additions needs, so that loads are the
// limit.
float sum_values(const float* values, int64_t count) {
  constexpr int kUnroll = 8;
  Vec sums[kUnroll];
  for (Vec& sum : sums) sum = Vec::zero();
  int64_t i = 0;
  for (; i + kUnroll * Vec::kLanes <= count; i += kUnroll * Vec::kLanes)
    for (int j = 0; j < kUnroll; ++j) sums[j] = sums[j] + Vec::load(values + i + j * Vec::kLanes);
  for (; i < count; i += Vec::kLanes) sums[0] = sums[0] + Vec::load(values + i, count - i);
  for (int j = 1; j < kUnroll; ++j) sums[0] = sums[0] + sums[j];
  return reduce_add(sums[0]);
}

// chain += a * b, which every unit has, stops growing once its last place is larger: no overflow and no denormals
// however long it runs.
int64_t multiply_fp32(int64_t rounds, float* sink) {
  const Vec a = Vec::set1(0.875f), b = Vec::set1(0.125f);
  // Unrolled by hand: gcc 12 keeps an array that a loop indexes on the stack, and stores to it.
  Vec chains[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) chains[c] = Vec::set1(static_cast<float>(c));
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = fma(a, b, chains[c]);
#pragma GCC unroll 12
  for (int c = 1; c < kChains; ++c) chains[0] = chains[0] + chains[c];
  *sink = reduce_add(chains[0]);
  return rounds * kChains * Vec::kLanes * 2;
}

}  // namespace
}  // namespace tilewright
