// exp, tanh, sigmoid, softplus, silu, gelu on Vec. Include after a Vec.
#pragma once

namespace tilewright {
namespace {

// e^x, relative error under 2e-7; e^-87.3 below that, e^88.3 above that.
inline Vec exp(Vec x) {
  // x is the second operand: if it is NaN, min and max return it, so NaN is kept.
  const Vec clamped = max(Vec::set1(-87.3f), min(Vec::set1(88.3f), x));
  // Adding 1.5 * 2^23 rounds to an integer in one step; a rounding instruction takes twice as long.
  const Vec magic = Vec::set1(12582912.0f);
  const Vec n = fma(clamped, Vec::set1(1.44269504f), magic) - magic;
  // ln 2 in two parts, so that n * high is exact.
  Vec r = fma(n, Vec::set1(-0.693359375f), clamped);
  r = fma(n, Vec::set1(2.12194440e-4f), r);
  // Minimax on |r| <= ln 2 / 2 with e^0 = 1 kept exact: 9.2e-8, the least degree below a rounding step.
  Vec p = Vec::set1(8.29027214e-3f);
  p = fma(p, r, Vec::set1(4.18981598e-2f));
  p = fma(p, r, Vec::set1(1.66676381e-1f));
  p = fma(p, r, Vec::set1(4.99991478e-1f));
  p = fma(p, r, Vec::set1(9.99999706e-1f));
  p = fma(p, r, Vec::set1(1.0f));
  return scale_by_power_of_2(p, n);
}

// 2^f for |f| <= 1/2, exactly 1 at 0. Precise: relative error 1e-7; rough: 1e-4, a twentieth of a rounding to bf16.
template <bool kRough>
inline Vec exp2_fraction(Vec f) {
  Vec p;
  if constexpr (kRough) {
    p = fma(f, Vec::set1(0.05500893236f), Vec::set1(0.2422109708f));
    p = fma(p, f, Vec::set1(0.6932829281f));
  } else {
    p = fma(f, Vec::set1(0.001326472738f), Vec::set1(0.009671512838f));
    p = fma(p, f, Vec::set1(0.05550733744f));
    p = fma(p, f, Vec::set1(0.2402224208f));
    p = fma(p, f, Vec::set1(0.6931469776f));
  }
  return fma(p, f, Vec::set1(1.0f));
}

// 1 / (1 + e^-x). Rough: relative error 2e-4, for results that are rounded to bf16 next, at two thirds of the cost.
template <bool kRough = false>
inline Vec sigmoid(Vec x) {
  const Vec one = Vec::set1(1.0f);
  if constexpr (kRough) {
    const Vec t = max(Vec::set1(-126.0f), min(Vec::set1(126.0f), x * Vec::set1(-1.44269504f)));
    const Vec magic = Vec::set1(12582912.0f);
    const Vec n = (t + magic) - magic;
    return reciprocal_rough(one + scale_by_power_of_2(exp2_fraction<true>(t - n), n));
  } else {
    return reciprocal(one + exp(Vec::zero() - x));
  }
}

// log(1 + e^x) as max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) as 2 artanh(s), s = y / (2 + y) <= 1/3: the
// series to s^15 leaves 3e-9 of it. Relative error under 4e-7.
inline Vec softplus(Vec x) {
  const Vec y = exp(min(x, Vec::zero() - x));
  const Vec s = y / (y + Vec::set1(2.0f));
  const Vec square = s * s;
  Vec p = Vec::set1(2.0f / 15);
  p = fma(p, square, Vec::set1(2.0f / 13));
  p = fma(p, square, Vec::set1(2.0f / 11));
  p = fma(p, square, Vec::set1(2.0f / 9));
  p = fma(p, square, Vec::set1(2.0f / 7));
  p = fma(p, square, Vec::set1(2.0f / 5));
  p = fma(p, square, Vec::set1(2.0f / 3));
  p = fma(p, square, Vec::set1(2.0f));
  return fma(p, s, max(Vec::zero(), x));
}

template <bool kRough = false>
inline Vec silu(Vec x) {
  return x * sigmoid<kRough>(x);
}

// 1 - 2 / (e^2x + 1): exact to rounding away from 0, absolute error 1e-7 near it.
inline Vec tanh(Vec x) {
  const Vec one = Vec::set1(1.0f);
  return one - Vec::set1(2.0f) / (exp(x + x) + one);
}

// 0.5 (1 + tanh(u)) is 1 / (1 + e^-2u): no cancellation for large negative x. The 2 is in the constants.
template <bool kRough = false>
inline Vec gelu_tanh(Vec x) {
  return x * sigmoid<kRough>(x * fma(x * x, Vec::set1(0.0713548162f), Vec::set1(1.5957691216f)));
}

// erfc on x >= 0 by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7, turned into the normal tail of gelu.
inline Vec gelu_erf(Vec x) {
  const Vec one = Vec::set1(1.0f);
  const Vec zero = Vec::zero();
  const Vec absolute = min(Vec::set1(100.0f), max(x, zero - x));  // the tail is 0 by then: inf stays inf
  const Vec magnitude = absolute * Vec::set1(0.7071067812f);
  const Vec t = reciprocal(fma(magnitude, Vec::set1(0.3275911f), one));
  Vec p = Vec::set1(1.061405429f);
  p = fma(p, t, Vec::set1(-1.453152027f));
  p = fma(p, t, Vec::set1(1.421413741f));
  p = fma(p, t, Vec::set1(-0.284496736f));
  p = fma(p, t, Vec::set1(0.254829592f));
  const Vec tail = p * t * exp(zero - magnitude * magnitude) * Vec::set1(0.5f);
  // x > 0: x (1 - tail); x < 0: x tail.
  return max(x, zero) - absolute * tail;
}

template <bool kRough = false>
inline Vec gelu_quick(Vec x) {
  return x * sigmoid<kRough>(x * Vec::set1(1.702f));
}

}  // namespace
}  // namespace tilewright
