// Normalisation without a division or a table, with the same bits. Include after a Vec with fused multiply-add.
#pragma once

#include "kernels/image/image.h"

namespace tilewright {
namespace {

// (v * rescale - mean) / std with numpy's roundings, for integers v in [0, 255]. A gather from a 256-entry table costs
// some 20 cycles for 16 values and a division 16; this is 6 multiply-adds.
struct Normalizer {
  Vec scale_high, scale_low, mean, std, inverse_std;

  Normalizer(const ImageArgs& args, int channel)
      : mean(Vec::set1(args.mean[channel])),
        std(Vec::set1(args.std[channel])),
        inverse_std(Vec::set1(1.0f / args.std[channel])) {
    const float high = static_cast<float>(args.rescale);
    scale_high = Vec::set1(high);
    scale_low = Vec::set1(static_cast<float>(args.rescale - high));
  }
  Vec operator()(Vec v) const {
    // The fp64 factor as two floats: the product is rounded once.
    const Vec centered = fma(v, scale_high, v * scale_low) - mean;
    // Markstein: one exact remainder makes the quotient by a rounded reciprocal correctly rounded.
    const Vec quotient = centered * inverse_std;
    const Vec remainder = fma(Vec::zero() - quotient, std, centered);
    return fma(remainder, inverse_std, quotient);
  }
};

}  // namespace
}  // namespace tilewright
