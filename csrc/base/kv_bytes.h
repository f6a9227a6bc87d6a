// Keys and values in 8 bits: a row of a token's head shares one fp32 scale, and a byte stands for scale * number.
//
//   int8  a number from -127 to 127; scale = max |x| / 127
//   fp8   e4m3: a sign, four bits of exponent, three of mantissa, up to 448; scale = max |x| / 448
//
// A row with a NaN or an infinity has the scale NaN: it is not rounded away. One of zeros has the scale 0.
// Read, a byte is the bf16 nearest to scale * number: attention multiplies that, as if the cache were of bf16.
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

// The nearest e4m3, ties to even, of a value from -448 to 448.
inline uint8_t to_fp8(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 24 & 0x80u;
  bits &= 0x7fffffffu;
  float magnitude;
  __builtin_memcpy(&magnitude, &bits, 4);
  // Below 2^-6 steps are 2^-9: adding 2^14 leaves whole steps in the last bits of the sum.
  const float steps = magnitude + 16384.0f;
  uint32_t small;
  __builtin_memcpy(&small, &steps, 4);
  const uint32_t normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (magnitude < 0.015625f ? small - 0x46800000u : normal));
}

// Writes a row of `width` values to bytes[at(d)], and gives its scale.
template <KvFormat kFormat, class T, class At>
inline float encode_row(const T* row, int64_t width, KvByte* bytes, At at) {
  float highest = 0.0f, finite = 0.0f;
  for (int64_t d = 0; d < width; ++d) {
    const float value = to_float(row[d]), size = value < 0 ? -value : value;
    highest = size > highest ? size : highest;
    finite += value * 0.0f;  // NaN once one of them is no number
  }
  const bool is_zero = highest < kLeastScaled;
  constexpr float kLargest = kFormat == KvFormat::int8 ? kLargestInt8 : kLargestFp8;
  const float inverse = is_zero || finite != 0.0f ? 0.0f : kLargest / highest;
  for (int64_t d = 0; d < width; ++d) {
    // A row that is no number has the number 0 throughout: NaN times it is NaN.
    const float scaled = inverse == 0.0f ? 0.0f : to_float(row[d]) * inverse;
    if constexpr (kFormat == KvFormat::int8) {
      const float shifted = scaled + 12582912.0f;  // 1.5 * 2^23: its last bits are the nearest whole number
      uint32_t bits;
      __builtin_memcpy(&bits, &shifted, 4);
      bytes[at(d)] = {static_cast<uint8_t>(bits)};
    } else {
      bytes[at(d)] = {to_fp8(scaled < -kLargest ? -kLargest : scaled > kLargest ? kLargest : scaled)};
    }
  }
  return finite != 0.0f ? __builtin_nanf("") : is_zero ? 0.0f : highest / kLargest;
}

// Of the compiler's own vectors: 16 lanes on any machine, in as many registers as they take there.
typedef uint8_t Lanes8 __attribute__((vector_size(16)));
typedef int8_t SignedLanes8 __attribute__((vector_size(16)));
typedef uint16_t Lanes16 __attribute__((vector_size(32)));
typedef int32_t Lanes32 __attribute__((vector_size(64)));
typedef float FloatLanes __attribute__((vector_size(64)));

// 16 bytes times 16 scales as bf16.
template <KvFormat kFormat>
inline void decode_lanes(const KvByte* bytes, const FloatLanes& scales, bf16* out) {
  FloatLanes numbers;
  if constexpr (kFormat == KvFormat::int8) {
    SignedLanes8 narrow;
    __builtin_memcpy(&narrow, bytes, sizeof(narrow));
    numbers = __builtin_convertvector(__builtin_convertvector(narrow, Lanes32), FloatLanes);
  } else {
    Lanes8 narrow;
    __builtin_memcpy(&narrow, bytes, sizeof(narrow));
    const Lanes32 code = __builtin_convertvector(narrow, Lanes32);
    const Lanes32 size = code & 0x7f, sign = (code & 0x80) << 24;
    // An exponent of 0 counts steps of 2^-9; others move to fp32's bias.
    const FloatLanes steps = __builtin_convertvector(size, FloatLanes) * 0x1p-9f;
    const Lanes32 normal = (size << 20) + (120 << 23), is_small = size < 8;
    numbers = (FloatLanes)(((is_small & (Lanes32)steps) | (~is_small & normal)) | sign);
  }
  const FloatLanes values = numbers * scales;
  Lanes32 bits = (Lanes32)values;
  bits = bits + 0x7fff + ((bits >> 16) & 1);
  const Lanes16 rounded = __builtin_convertvector(bits >> 16, Lanes16);
  __builtin_memcpy(out, &rounded, sizeof(rounded));
}

// Key tiles, [tiles] of 32 dims by the same 16 tokens, with the tokens' scales.
template <KvFormat kFormat>
inline void decode_key_tiles(const KvByte* tiles, int64_t count, const float* scales, bf16* out) {
  FloatLanes of_columns[2];  // each twice: two dims of a token lie side by side
  for (int lane = 0; lane < 16; ++lane)
    of_columns[0][lane] = scales[lane / 2], of_columns[1][lane] = scales[8 + lane / 2];
  for (int64_t i = 0; i < count * kTileElements; i += 32) {
    decode_lanes<kFormat>(tiles + i, of_columns[0], out + i);
    decode_lanes<kFormat>(tiles + i + 16, of_columns[1], out + i + 16);
  }
}

// A value tile, 32 tokens by 16 dims, with the tokens' scales.
template <KvFormat kFormat>
inline void decode_value_tile(const KvByte* tile, const float* scales, bf16* out) {
  for (int row = 0; row < kTileDepth / 2; ++row) {
    typedef int64_t Pairs __attribute__((vector_size(64)));
    int64_t pair;  // the scales of two tokens, which lie side by side
    __builtin_memcpy(&pair, scales + 2 * row, sizeof(pair));
    const FloatLanes of_tokens = (FloatLanes)(Pairs{} + pair);
    decode_lanes<kFormat>(tile + row * 32, of_tokens, out + row * 32);
    decode_lanes<kFormat>(tile + row * 32 + 16, of_tokens, out + row * 32 + 16);
  }
}

}  // namespace
}  // namespace tilewright
