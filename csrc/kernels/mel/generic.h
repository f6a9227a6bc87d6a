// Log-mel frames in terms of Vec; each ISA file includes this after its Vec.
//
// A lane is a frame: all frames of a Vec go through the same transform, with shuffles only where samples are loaded and
// bins stored. A real transform of 400 samples is a complex one of 200 points, the even and the odd samples, separated
// again afterwards; the 200 points are transformed by passes of 5, 5, 4 and 2, each of which writes its results in
// order (Stockham), so that no reordering pass is needed.
#pragma once

#include "base/scratch.h"
#include "base/vec/row.h"
#include "kernels/mel/mel.h"

namespace tilewright {
namespace {

constexpr int kLanes = Vec::kLanes;

struct Complex {
  Vec re, im;
};

inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
inline Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
inline Complex times(Complex a, float factor) {
  const Vec f = Vec::set1(factor);
  return {a.re * f, a.im * f};
}
inline Complex times(Complex a, float re, float im) {
  const Vec r = Vec::set1(re), i = Vec::set1(im);
  return {a.re * r - a.im * i, fma(a.re, i, a.im * r)};
}
inline Complex minus_i_times(Complex a) { return {a.im, Vec::zero() - a.re}; }

// 200 points of each lane, real parts, then imaginary ones.
struct Points {
  float* re;
  float* im;
  Complex load(int64_t i) const { return {Vec::load(re + i * kLanes), Vec::load(im + i * kLanes)}; }
  void store(int64_t i, Complex value) const {
    value.re.store(re + i * kLanes);
    value.im.store(im + i * kLanes);
  }
};

// Computes the discrete transform of 2, 4 or 5 points in place.
inline void transform(Complex (&a)[2]) {
  const Complex sum = a[0] + a[1];
  a[1] = a[0] - a[1];
  a[0] = sum;
}

inline void transform(Complex (&a)[4]) {
  const Complex even = a[0] + a[2], odd = a[1] + a[3], difference = a[0] - a[2];
  const Complex turned = minus_i_times(a[1] - a[3]);
  a[0] = even + odd;
  a[1] = difference + turned;
  a[2] = even - odd;
  a[3] = difference - turned;
}

inline void transform(Complex (&a)[5]) {
  constexpr float kCos1 = 0.30901699437494742f, kCos2 = -0.80901699437494742f;  // of 72 and 144 degrees
  constexpr float kSin1 = 0.95105651629515357f, kSin2 = 0.58778525229247313f;
  const Complex outer = a[1] + a[4], inner = a[2] + a[3], outer_odd = a[1] - a[4], inner_odd = a[2] - a[3];
  const Complex even1 = a[0] + times(outer, kCos1) + times(inner, kCos2);
  const Complex even2 = a[0] + times(outer, kCos2) + times(inner, kCos1);
  const Complex odd1 = minus_i_times(times(outer_odd, kSin1) + times(inner_odd, kSin2));
  const Complex odd2 = minus_i_times(times(outer_odd, kSin2) - times(inner_odd, kSin1));
  a[0] = a[0] + outer + inner;
  a[1] = even1 + odd1;
  a[2] = even2 + odd2;
  a[3] = even2 - odd2;
  a[4] = even1 - odd1;
}

// Runs one pass over transforms of `count` points that are `stride` apart.
template <int kRadix>
inline void pass(const MelTables& tables, int64_t count, int64_t stride, const Points& x, const Points& y) {
  const int64_t part = count / kRadix, step = kMelWindow / count;
  for (int64_t p = 0; p < part; ++p)
    for (int64_t q = 0; q < stride; ++q) {
      Complex a[kRadix];
      for (int i = 0; i < kRadix; ++i) a[i] = x.load(q + stride * (p + i * part));
      transform(a);
      y.store(q + stride * kRadix * p, a[0]);
      for (int i = 1; i < kRadix; ++i) {
        const int64_t root = p * i * step;
        y.store(q + stride * (kRadix * p + i), times(a[i], tables.cosines[root], tables.sines[root]));
      }
    }
}

// Loads the windowed samples of a frame into its lane.
inline void load_frame(const MelArgs& args, int64_t frame, int lane, const Points& points) {
  const int64_t first = frame * kMelHop - kMelWindow / 2, last = args.num_samples - 1;
  for (int64_t i = 0; i < kMelWindow; ++i) {
    int64_t at = first + i;
    if (at < 0) at = -at;
    if (at > last) at = 2 * last - at;
    float* part = i % 2 ? points.im : points.re;
    part[i / 2 * kLanes + lane] = args.samples[at] * args.tables->window[i];
  }
}

// Computes the power of all frequencies from the transform of the even and odd samples as real and imaginary parts.
inline void power_of(const MelTables& tables, const Points& points, float* power) {
  for (int64_t k = 0; k < kMelFrequencies; ++k) {
    const Complex z = points.load(k % kMelPoints), other = points.load((kMelPoints - k) % kMelPoints);
    const Complex mirrored = {other.re, Vec::zero() - other.im};
    const Complex even = z + mirrored, odd = minus_i_times(z - mirrored);  // each twice what it should be
    const Complex sum = times(even + times(odd, tables.cosines[k], tables.sines[k]), 0.5f);
    fma(sum.re, sum.re, sum.im * sum.im).store(power + k * kLanes);
  }
}

float mel_logs(const MelArgs& args, int64_t begin, int64_t end) {
  const int64_t num_floats = (4 * kMelPoints + kMelFrequencies + args.num_bins) * kLanes;
  float* memory = static_cast<float*>(thread_scratch(static_cast<size_t>(num_floats) * sizeof(float)));
  const Points a{memory, memory + kMelPoints * kLanes};
  const Points b{memory + 2 * kMelPoints * kLanes, memory + 3 * kMelPoints * kLanes};
  float* power = memory + 4 * kMelPoints * kLanes;
  float* bins = power + kMelFrequencies * kLanes;
  const MelTables& tables = *args.tables;
  float largest = -__builtin_inff();
  for (int64_t first = begin; first < end; first += kLanes) {
    const int count = static_cast<int>(end - first < kLanes ? end - first : kLanes);
    // The last frame also fills the remaining lanes.
    for (int lane = 0; lane < kLanes; ++lane) load_frame(args, first + (lane < count ? lane : count - 1), lane, a);
    pass<5>(tables, 200, 1, a, b);
    pass<5>(tables, 40, 5, b, a);
    pass<4>(tables, 8, 25, a, b);
    pass<2>(tables, 2, 100, b, a);
    power_of(tables, a, power);
    for (int64_t bin = 0; bin < args.num_bins; ++bin) {
      const float* filter = args.filters.row<float>(bin);
      Vec sum = Vec::zero();
      for (int64_t k = args.ranges[bin].begin; k < args.ranges[bin].end; ++k)
        sum = fma(Vec::load(power + k * kLanes), Vec::set1(filter[k]), sum);
      max(sum, Vec::set1(1e-10f)).store(bins + bin * kLanes);
    }
    for (int lane = 0; lane < count; ++lane) {
      float* y = args.y.row<float>(first + lane);
      for (int64_t bin = 0; bin < args.num_bins; ++bin) {
        y[bin] = __builtin_log10f(bins[bin * kLanes + lane]);
        largest = y[bin] > largest ? y[bin] : largest;
      }
    }
  }
  return largest;
}

void mel_finish(const MelArgs& args, float lowest, int64_t begin, int64_t end) {
  const Vec low = Vec::set1(lowest), four = Vec::set1(4.0f), quarter = Vec::set1(0.25f);
  for (int64_t frame = begin; frame < end; ++frame) {
    float* y = args.y.row<float>(frame);
    for_each_vec(args.num_bins, [&](int64_t i, auto count) {
      store_some((max(load_some(y + i, count), low) + four) * quarter, y + i, count);
    });
  }
}

}  // namespace
}  // namespace tilewright
