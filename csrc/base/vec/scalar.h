// Vec for any machine: four floats, and loops that the compiler may vectorise. The other levels define the same names.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/bf16.h"

namespace tilewright {
namespace {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr bool kFmaIsExact = false;       // fma() rounds once
  static constexpr bool kScaleUnderflows = false;  // scale_by_power_of_2() takes powers below -126, and gives 0
  static constexpr bool kHasFmaByLane = false;     // fma_lane() multiplies by one lane of a Vec
  static constexpr bool kHasBf16Dot = false;       // PairVec multiplies pairs of bf16 and adds them up
  float v[kLanes];

  static Vec zero() { return set1(0.0f); }
  static Vec set1(float x) { return {{x, x, x, x}}; }

  static Vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Vec load(const bf16* p) { return {{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}}; }
  template <class T>
  static Vec load(const T* p, int64_t count) {
    Vec r = zero();
    for (int i = 0; i < kLanes && i < count; ++i) r.v[i] = to_float(p[i]);
    return r;
  }
  template <class T>
  void store(T* p) const {
    for (int i = 0; i < kLanes; ++i) assign(p[i], v[i]);
  }
  // Stores past the caches if the level can; p is aligned to the bytes stored.
  template <class T>
  void stream(T* p) const {
    store(p);
  }
  template <class T>
  void store(T* p, int64_t count) const {
    for (int i = 0; i < kLanes && i < count; ++i) assign(p[i], v[i]);
  }
};

// Pairs of bf16 that are multiplied and summed, if the level can.
struct PairVec {};

// Use of the registers in products of tiles (base/dot.h): rows whose sums they hold, the most of them that divide 32,
// and adjacent column tiles for that many rows. Then the tiles of depth that all rows are multiplied with before the
// next ones, 0 for all: if the second-level cache is too slow to be read for each kRows. Then whether this many rows
// read tiles of an element size from memory rather than from a cache, and how far ahead to prefetch them.
struct DotTraits {
  static constexpr int kRows = 2, kRowsOf32 = 2;
  static constexpr int kDepthTiles = 0;
  static constexpr int tiles(int) { return 1; }
  static constexpr bool prefetches(int rows, size_t) { return rows <= 4; }
  static constexpr int kPrefetchBytes = 8192;
};

// Makes streamed stores visible before any later notification of them.
inline void stream_fence() {}

template <class Fn>
inline Vec map(Vec a, Vec b, Fn fn) {
  Vec r;
  for (int i = 0; i < Vec::kLanes; ++i) r.v[i] = fn(a.v[i], b.v[i]);
  return r;
}

inline Vec operator+(Vec a, Vec b) {
  return map(a, b, [](float x, float y) { return x + y; });
}
inline Vec operator-(Vec a, Vec b) {
  return map(a, b, [](float x, float y) { return x - y; });
}
inline Vec operator*(Vec a, Vec b) {
  return map(a, b, [](float x, float y) { return x * y; });
}
inline Vec operator/(Vec a, Vec b) {
  return map(a, b, [](float x, float y) { return x / y; });
}
// Returns the second operand if either is NaN.
inline Vec max(Vec a, Vec b) {
  return map(a, b, [](float x, float y) { return x > y ? x : y; });
}
inline Vec min(Vec a, Vec b) {
  return map(a, b, [](float x, float y) { return x < y ? x : y; });
}

inline Vec fma(Vec a, Vec b, Vec c) {
  Vec r;
  for (int i = 0; i < Vec::kLanes; ++i) r.v[i] = a.v[i] * b.v[i] + c.v[i];
  return r;
}

inline Vec round(Vec a) {
  Vec r;
  for (int i = 0; i < Vec::kLanes; ++i) r.v[i] = std::nearbyintf(a.v[i]);
  return r;
}

// a * 2^n for whole n in [-126, 127].
inline Vec scale_by_power_of_2(Vec a, Vec n) {
  Vec r;
  for (int i = 0; i < Vec::kLanes; ++i) {
    const int32_t power = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;
    const int32_t bits = (power + 127) << 23;
    float factor;
    std::memcpy(&factor, &bits, sizeof(factor));
    r.v[i] = a.v[i] * factor;
  }
  return r;
}

// 1 / a to a rounding step or two, in the level's cheapest way.
inline Vec reciprocal(Vec a) { return Vec::set1(1.0f) / a; }
inline Vec reciprocal_rough(Vec a) { return reciprocal(a); }

inline float reduce_add(Vec a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
inline float reduce_max(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < Vec::kLanes; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}

// Lanes [begin, end) of a, other elsewhere.
inline Vec keep_lanes(Vec a, int64_t begin, int64_t end, Vec other) {
  for (int i = 0; i < Vec::kLanes; ++i)
    if (i < begin || i >= end) a.v[i] = other.v[i];
  return a;
}

// a where flag is not zero, other elsewhere.
inline Vec keep_flagged(Vec a, const uint8_t* flags, Vec other) {
  for (int i = 0; i < Vec::kLanes; ++i)
    if (!flags[i]) a.v[i] = other.v[i];
  return a;
}

// Splits kLanes columns of a pair row (see base/tile.h) into its even and odd depth.
inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  for (int i = 0; i < Vec::kLanes; ++i) {
    even.v[i] = to_float(p[2 * i]);
    odd.v[i] = to_float(p[2 * i + 1]);
  }
}

// Deinterleaves p[0], p[1], ... p[2 kLanes - 1] into p[0], p[2], ... and p[1], p[3], ...
inline void load_interleaved(const float* p, Vec& even, Vec& odd) {
  even = {{p[0], p[2], p[4], p[6]}};
  odd = {{p[1], p[3], p[5], p[7]}};
}

// The inverse of load_interleaved.
template <class T>
inline void store_interleaved(T* p, Vec even, Vec odd) {
  for (int i = 0; i < Vec::kLanes; ++i) {
    assign(p[2 * i], even.v[i]);
    assign(p[2 * i + 1], odd.v[i]);
  }
}

}  // namespace
}  // namespace tilewright
