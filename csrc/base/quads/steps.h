// Adds the sums of a group to those of its row, for levels without an instruction for pairs of products. Include after
// an IntVec.
#pragma once

#include <cstdint>

namespace tilewright {
namespace {

// Steps of Vec::kLanes columns, and the value of the quant 8.
struct Steps {
  IntVec step, centre;
  static Steps load(const uint8_t* steps, const int8_t* bases) {
    const IntVec step = IntVec::load_bytes(steps);
    return {step, IntVec::load_bytes(bases).plus(step, IntVec::set1(8))};
  }
};

// total + the products of a group: `sums` are those of its quants minus 8, `x_sum` is the sum of x.
inline IntVec add_steps(IntVec total, IntVec sums, int32_t x_sum, const Steps& steps) {
  return total.plus(steps.step, sums).plus(steps.centre, IntVec::set1(x_sum));
}

}  // namespace
}  // namespace tilewright
