// Vectors of 8-bit pixels for any machine: plain loops. The other levels define the same names.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/image/image.h"

namespace tilewright {
namespace {

struct Bytes {
  static constexpr int kCount = 16;
  uint8_t v[kCount];

  static Bytes load(const uint8_t* p) {
    Bytes r;
    std::memcpy(r.v, p, kCount);
    return r;
  }
  static Bytes load(const uint8_t* p, int64_t count) {
    if (count >= kCount) return load(p);
    Bytes r = {};
    std::memcpy(r.v, p, static_cast<size_t>(count));
    return r;
  }
  void store(uint8_t* p) const { std::memcpy(p, v, kCount); }
  void store(uint8_t* p, int64_t count) const {
    std::memcpy(p, v, static_cast<size_t>(count < kCount ? count : kCount));
  }
  // Stores 16 bytes to p: group 0 is the first 16 of the vector.
  void store_group(uint8_t* p, int) const { store(p); }
};

// Transposes each 16 x 16 block, rows[i] group g.
inline void transpose_groups(Bytes (&rows)[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const uint8_t swapped = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = swapped;
    }
}

// A weighted sum of vectors in fixed point.
struct WeightedSum {
  int32_t sum[Bytes::kCount];

  WeightedSum() {
    for (int32_t& s : sum) s = 1 << 21;
  }
  void add(Bytes a, Bytes b, const int16_t* pair) {
    const int32_t weight_a = pair[0] * (1 << kWeightLowBits) + pair[2];
    const int32_t weight_b = pair[1] * (1 << kWeightLowBits) + pair[3];
    for (int i = 0; i < Bytes::kCount; ++i) sum[i] += a.v[i] * weight_a + b.v[i] * weight_b;
  }
  // Returns the sum rounded and clipped to 8 bits.
  Bytes result() const {
    Bytes r;
    for (int i = 0; i < Bytes::kCount; ++i) {
      const int32_t value = sum[i] >> 22;
      r.v[i] = static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
    }
    return r;
  }
};

// Loads the three channels of Vec::kLanes pixels.
inline void load_pixels(const uint8_t* p, Vec (&channels)[3]) {
  for (int i = 0; i < Vec::kLanes; ++i)
    for (int c = 0; c < 3; ++c) channels[c].v[i] = p[3 * i + c];
}

// (v * rescale - mean) / std with numpy's roundings.
struct Normalizer {
  double rescale;
  float mean, std;

  Normalizer(const ImageArgs& args, int channel)
      : rescale(args.rescale), mean(args.mean[channel]), std(args.std[channel]) {}
  Vec operator()(Vec v) const {
    for (float& value : v.v) value = (static_cast<float>(value * rescale) - mean) / std;
    return v;
  }
};

}  // namespace
}  // namespace tilewright
