// Sine and cosine of each lane, and the square of the sine. Include after a Vec.
#pragma once

#include <cmath>

namespace tilewright {
namespace {

// Absolute error under 1.2e-7 for |x| up to 2^20 (angles of rope at a million tokens).
inline void sincos(Vec x, Vec& sine, Vec& cosine) {
  if constexpr (!Vec::kFmaIsExact) {
    for (int i = 0; i < Vec::kLanes; ++i) {
      sine.v[i] = std::sin(x.v[i]);
      cosine.v[i] = std::cos(x.v[i]);
    }
    return;
  }
  // x = n pi/2 + r. pi/2 in three parts: the first step is exact because the product is not rounded and the
  // difference is a multiple of 2^-23 below 1; the others carry the remaining 48 bits.
  const Vec n = round(x * Vec::set1(0.636619772f));
  Vec r = fma(n, Vec::set1(-1.57079637050628662109375f), x);
  r = fma(n, Vec::set1(4.37113900018624283e-8f), r);
  r = fma(n, Vec::set1(1.71512451e-15f), r);
  // The minimax polynomials of Cephes on [-pi/4, pi/4].
  const Vec square = r * r;
  Vec s = Vec::set1(-1.9515295891e-4f);
  s = fma(s, square, Vec::set1(8.3321608736e-3f));
  s = fma(s, square, Vec::set1(-1.6666654611e-1f));
  s = fma(s * square, r, r);
  Vec c = Vec::set1(2.443315711809948e-5f);
  c = fma(c, square, Vec::set1(-1.388731625493765e-3f));
  c = fma(c, square, Vec::set1(4.166664568298827e-2f));
  c = fma(c * square, square, fma(square, Vec::set1(-0.5f), Vec::set1(1.0f)));
  // The remaining quarter turns, k in -2..2, as the integers cos(k pi/2) and sin(k pi/2): exact, without a blend.
  const Vec k = fma(round(n * Vec::set1(0.25f)), Vec::set1(-4.0f), n);
  const Vec turn_sine = fma(round(k * Vec::set1(0.5f)), Vec::set1(-2.0f), k);
  const Vec turn_cosine = fma(fma(k, k, turn_sine * turn_sine), Vec::set1(-0.5f), Vec::set1(1.0f));
  sine = fma(turn_cosine, s, turn_sine * c);
  cosine = turn_cosine * c - turn_sine * s;
}

// sin(x)^2, absolute error under 3e-7 for |x| up to 2^20. Its period is pi, so quarter turns need not be distinguished:
// half the work of `sincos`.
inline Vec sin_squared(Vec x) {
  if constexpr (!Vec::kFmaIsExact) {
    for (int i = 0; i < Vec::kLanes; ++i) {
      const float sine = std::sin(x.v[i]);
      x.v[i] = sine * sine;
    }
    return x;
  }
  // x = n pi + r, pi in three parts as above.
  const Vec n = round(x * Vec::set1(0.318309886f));
  Vec r = fma(n, Vec::set1(-3.1415927410125732421875f), x);
  r = fma(n, Vec::set1(8.74227800037248566e-8f), r);
  r = fma(n, Vec::set1(3.43024902e-15f), r);
  // Minimax on [-pi/2, pi/2]: 4.7e-9, a tenth of a rounding step at 1.
  const Vec square = r * r;
  Vec s = Vec::set1(2.5999117492e-6f);
  s = fma(s, square, Vec::set1(-1.9806550921e-4f));
  s = fma(s, square, Vec::set1(8.3330164076e-3f));
  s = fma(s, square, Vec::set1(-1.6666657061e-1f));
  s = fma(s * square, r, r);
  return s * s;
}

}  // namespace
}  // namespace tilewright
