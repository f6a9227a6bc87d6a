// See compare_scalar.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace tilewright {
namespace {

inline constexpr uint32x4_t kLaneBits = {1, 2, 4, 8};

inline uint32_t lanes_at_least(Vec a, Vec b) { return vaddvq_u32(vandq_u32(vcgeq_f32(a.v, b.v), kLaneBits)); }

// All ones in the given lanes.
inline uint32x4_t spread_bits(uint32_t lanes) { return vtstq_u32(vdupq_n_u32(lanes), kLaneBits); }

inline Vec keep_bits(Vec a, uint32_t lanes) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v), spread_bits(lanes)))};
}

inline Vec select_bits(Vec a, Vec b, uint32_t lanes) { return {vbslq_f32(spread_bits(lanes), a.v, b.v)}; }

inline void store_bits(Vec a, uint32_t lanes, float* out) {
  // Lanes of each set of bits, packed to the front: the bytes of a look-up, four per lane.
  static constexpr struct Orders {
    uint8_t bytes[16][16] = {};
    constexpr Orders() {
      for (int set = 0; set < 16; ++set)
        for (int lane = 0, at = 0; lane < 4; ++lane)
          if (set >> lane & 1)
            for (int byte = 0; byte < 4; ++byte) bytes[set][at++] = static_cast<uint8_t>(4 * lane + byte);
    }
  } kOrders;
  const uint8x16_t packed = vqtbl1q_u8(vreinterpretq_u8_f32(a.v), vld1q_u8(kOrders.bytes[lanes & 15]));
  vst1q_f32(out, vreinterpretq_f32_u8(packed));
}

}  // namespace
}  // namespace tilewright
