// Keys and values in 8 bits: a row of a token's head shares one fp32 scale, and a byte stands for scale * quant.
//
//   int8  an integer from -127 to 127; scale = max |x| / 127
//   fp8   e4m3: a sign, four bits of exponent, three of mantissa, up to 448; scale = max |x| / 448
//
// A row with a NaN or an infinity has the scale NaN: it is not rounded away. One of zeros has the scale 0.
// Read, a byte is the bf16 nearest to scale * quant: attention multiplies that, as if the cache were of bf16.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/kv_layout.h"

namespace tilewright {

struct KvByte {
  uint8_t bits;
};

namespace {

inline constexpr float kLargestInt8 = 127.0f, kLargestFp8 = 448.0f;
inline constexpr float kLeastScaled = 1e-30f;  // rows of smaller values count as zeros: their scale has an inverse

// Returns the nearest e4m3, ties to even, of a value from -448 to 448. Branchless, so that loops are vectorised.
inline uint8_t to_fp8(float value) {
  const int32_t all = __builtin_bit_cast(int32_t, value), size = all & 0x7fffffff, sign = all >> 24 & 0x80;
  // Below 2^-6 steps are 2^-9: adding 2^14 leaves whole steps in the last bits of the sum.
  const int32_t small = __builtin_bit_cast(int32_t, __builtin_bit_cast(float, size) + 16384.0f) - 0x46800000;
  const int32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  const int32_t is_small = (size - 0x3c800000) >> 31;  // of 2^-6
  return static_cast<uint8_t>((small & is_small) | (normal & ~is_small) | sign);
}

// Returns the nearest integer, ties to even, of a value from -127 to 127.
inline uint8_t to_int8(float value) {
  return static_cast<uint8_t>(__builtin_bit_cast(uint32_t, value + 12582912.0f));  // 1.5 * 2^23: the last bits are it
}

// Writes the quants of a row of `width` values, and returns its scale.
template <KvFormat kFormat, class T>
inline float encode_row(const T* __restrict row, int64_t width, KvByte* __restrict quants) {
  constexpr float kLargest = kFormat == KvFormat::int8 ? kLargestInt8 : kLargestFp8;
  int32_t most = 0;  // as bits: those of positive floats are in order, what is no number above them
  for (int64_t d = 0; d < width; ++d) {
    const int32_t size = __builtin_bit_cast(int32_t, to_float(row[d])) & 0x7fffffff;
    most = size > most ? size : most;
  }
  const float highest = __builtin_bit_cast(float, most);
  const bool is_finite = most < 0x7f800000, is_scaled = is_finite && highest >= kLeastScaled;
  if (!is_scaled) {  // NaN times 0 is NaN
    __builtin_memset(quants, 0, width);
    return is_finite ? 0.0f : __builtin_nanf("");
  }
  // The largest product may be an ulp too large, which rounds to the largest quant all the same.
  const float inverse = kLargest / highest;
  for (int64_t d = 0; d < width; ++d) {
    const float scaled = to_float(row[d]) * inverse;
    quants[d].bits = kFormat == KvFormat::int8 ? to_int8(scaled) : to_fp8(scaled);
  }
  return highest / kLargest;
}

// Value of a byte before scaling; in a form that lets loops over it be vectorised.
template <KvFormat kFormat>
inline float quant_of(KvByte byte) {
  if constexpr (kFormat == KvFormat::int8) {
    return static_cast<float>(static_cast<int8_t>(byte.bits));
  } else {
    const int32_t code = byte.bits, size = code & 0x7f, sign = (code & 0x80) << 24;
    // An exponent of 0 counts steps of 2^-9; others get fp32's bias.
    const int32_t steps = __builtin_bit_cast(int32_t, static_cast<float>(size) * 0x1p-9f);
    const int32_t normal = (size << 20) + (120 << 23), is_small = (size - 8) >> 31;
    return __builtin_bit_cast(float, (steps & is_small) | (normal & ~is_small) | sign);
  }
}

// Writes bytes times scales as bf16: a row of a tile.
template <KvFormat kFormat>
inline void decode_row(const KvByte* __restrict bytes, const float* __restrict scales, bf16* __restrict out) {
#pragma GCC ivdep
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, quant_of<kFormat>(bytes[i]) * scales[i]);
    out[i].bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

// Decodes key tiles, `count` of 32 dims by the same 16 tokens, with the tokens' scales.
template <KvFormat kFormat>
inline void decode_key_tiles(const KvByte* tiles, int64_t count, const float* scales, bf16* out) {
  alignas(64) float of_columns[32];  // each twice: two dims of a token lie side by side
  for (int i = 0; i < 32; ++i) of_columns[i] = scales[i / 2];
  for (int64_t i = 0; i < count * kTileElements; i += 32) decode_row<kFormat>(tiles + i, of_columns, out + i);
}

// Decodes a value tile, 32 tokens by 16 dims, with the tokens' scales.
template <KvFormat kFormat>
inline void decode_value_tile(const KvByte* tile, const float* scales, bf16* out) {
  for (int row = 0; row < kTileDepth / 2; ++row) {
    alignas(64) float of_tokens[32];  // those of two tokens in turns
    const float even = scales[2 * row], odd = scales[2 * row + 1];
    for (int i = 0; i < 32; i += 2) of_tokens[i] = even, of_tokens[i + 1] = odd;
    decode_row<kFormat>(tile + row * 32, of_tokens, out + row * 32);
  }
}

}  // namespace
}  // namespace tilewright
