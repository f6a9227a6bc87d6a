// Vectors of 8-bit pixels for NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels/image/image.h"
#include "kernels/image/normalizer.h"

namespace tilewright {
namespace {

struct Bytes {
  static constexpr int kCount = 16;
  uint8x16_t v;

  static Bytes load(const uint8_t* p) { return {vld1q_u8(p)}; }
  static Bytes load(const uint8_t* p, int64_t count) {
    if (count >= kCount) return load(p);
    uint8_t buffer[kCount] = {};
    std::memcpy(buffer, p, static_cast<size_t>(count));
    return load(buffer);
  }
  void store(uint8_t* p) const { vst1q_u8(p, v); }
  void store(uint8_t* p, int64_t count) const {
    if (count >= kCount) return store(p);
    uint8_t buffer[kCount];
    store(buffer);
    std::memcpy(p, buffer, static_cast<size_t>(count));
  }
  void store_group(uint8_t* p, int) const { store(p); }
};

// Interleaving rows i and i + 8 four times is a 16 x 16 transpose.
inline void transpose_groups(Bytes (&rows)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Bytes next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      next[2 * i].v = vzip1q_u8(rows[i].v, rows[i + 8].v);
      next[2 * i + 1].v = vzip2q_u8(rows[i].v, rows[i + 8].v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}

// A 23-bit weight does not fit a 16-bit multiply-add; its two halves would need two, no fewer than one of 32 bits.
struct WeightedSum {
  int32x4_t sum[4];

  WeightedSum() {
    for (int32x4_t& four : sum) four = vdupq_n_s32(1 << 21);
  }
  void add(Bytes a, Bytes b, const int16_t* pair) {
    add(a, pair[0] * (1 << kWeightLowBits) + pair[2]);
    add(b, pair[1] * (1 << kWeightLowBits) + pair[3]);
  }
  void add(Bytes a, int32_t weight) {
    const uint16x8_t front = vmovl_u8(vget_low_u8(a.v)), back = vmovl_u8(vget_high_u8(a.v));
    const uint32x4_t taps[4] = {vmovl_u16(vget_low_u16(front)), vmovl_u16(vget_high_u16(front)),
                                vmovl_u16(vget_low_u16(back)), vmovl_u16(vget_high_u16(back))};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[i] = vmlaq_n_s32(sum[i], vreinterpretq_s32_u32(taps[i]), weight);
  }
  Bytes result() const {
    uint16x4_t words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) words[i] = vqmovun_s32(vshrq_n_s32(sum[i], 22));
    return {vcombine_u8(vqmovn_u16(vcombine_u16(words[0], words[1])), vqmovn_u16(vcombine_u16(words[2], words[3])))};
  }
};

// A table look-up spreads each channel's bytes over 32 bits: an index of 255 gives a zero.
inline void load_pixels(const uint8_t* p, Vec (&channels)[3]) {
  uint64_t front;
  uint32_t back;
  std::memcpy(&front, p, sizeof(front));
  std::memcpy(&back, p + 8, sizeof(back));
  const uint8x16_t pixels = vcombine_u8(vcreate_u8(front), vcreate_u8(back));
#pragma GCC unroll 3
  for (uint32_t c = 0; c < 3; ++c) {
    const uint32x4_t from = {0xffffff00u + c, 0xffffff03u + c, 0xffffff06u + c, 0xffffff09u + c};
    channels[c].v = vcvtq_f32_u32(vreinterpretq_u32_u8(vqtbl1q_u8(pixels, vreinterpretq_u8_u32(from))));
  }
}

}  // namespace
}  // namespace tilewright
