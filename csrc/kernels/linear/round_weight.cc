// Weights as quants of 8 or 4 bits: done once per load, so plain code for all levels, some rows per task.
//
// The rules, and the candidates that are tried, are those of ops/quantized.py. Sums are added in another order, so that
// of two nearly equal candidates for a group the other one may be chosen.
#include "kernels/linear/round_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "base/half.h"
#include "base/parallel.h"
#include "base/rotate.h"
#include "base/scratch.h"

namespace tilewright {
namespace {

using Lanes = float __attribute__((vector_size(16)));  // supported by every machine of either architecture
constexpr int kLanes = 4, kMaxGroup = 256;

Lanes all(float x) { return Lanes{x, x, x, x}; }
Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
float sum_of(Lanes v) { return (v[0] + v[1]) + (v[2] + v[3]); }
Lanes clamp(Lanes v, float least, float most) {
  for (int i = 0; i < kLanes; ++i) v[i] = std::min(std::max(v[i], least), most);
  return v;
}
// Rounds to the nearest integer, ties to even, values below 2^22, as clamped ones are.
Lanes round(Lanes v) { return (v + all(12582912.0f)) - all(12582912.0f); }

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Returns the fp16 nearest to a value, ties to even; infinity if it is too large.
f16 half_of(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u)  // below 2^-14: a multiple of 2^-24, which is the last bit of 0.5
    return {static_cast<uint16_t>(sign | (bits_of(std::fabs(value) + 0.5f) - bits_of(0.5f)))};
  return {static_cast<uint16_t>(sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13)};
}

float inverse(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// A group of a row, padded with zeros, and its best rounding so far.
struct Group {
  alignas(16) float values[kMaxGroup];
  int size;
  bool is_rounded = false;
  float least_error = 0;
  f16 scale = {0}, min = {0};

  // The first candidate is always accepted: a scale that does not fit fp16 has no comparable error, and is reported.
  void offer(float error, f16 own_scale, f16 own_min) {
    if (is_rounded && !(error < least_error)) return;
    is_rounded = true;
    least_error = error;
    scale = own_scale;
    min = own_min;
  }

  float farthest() const {
    return *std::max_element(values, values + size, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
  }
};

void try_int4(Group& group) {
  const float farthest = group.farthest();
  for (const float place : {8.0f, 7.6f, 7.2f, 6.8f, 9.0f}) {
    const f16 scale = half_of(farthest / -place);
    const Lanes wide = all(to_float(scale)), inverted = all(inverse(to_float(scale)));
    Lanes error = all(0);
    for (int i = 0; i < group.size; i += kLanes) {
      const Lanes v = load(group.values + i);
      const Lanes apart = v - round(clamp(v * inverted, -8, 7)) * wide;
      error += apart * apart;
    }
    group.offer(sum_of(error), scale, {0});
  }
}

void try_uint4(Group& group) {
  const auto [least_at, most_at] = std::minmax_element(group.values, group.values + group.size);
  const float least = *least_at, most = *most_at, count = static_cast<float>(group.size);
  Lanes total = all(0);
  for (int i = 0; i < group.size; i += kLanes) total += load(group.values + i);
  const float mean = sum_of(total) / count;
  for (const float part : {1.0f, 0.9f, 0.82f}) {
    float step = (most - least) * (part / 15.0f), low = least + (most - least) * (0.5f - 0.5f * part);
    for (int fit = 0; fit < 3; ++fit) {
      const f16 scale = half_of(step), min = half_of(-low);
      const Lanes wide = all(to_float(scale)), inverted = all(inverse(to_float(scale))), shift = all(to_float(min));
      Lanes error = all(0), quants = all(0), squares = all(0), products = all(0);
      for (int i = 0; i < group.size; i += kLanes) {
        const Lanes v = load(group.values + i), n = round(clamp((v + shift) * inverted, 0, 15));
        const Lanes apart = (v + shift) - n * wide;
        error += apart * apart;
        quants += n;
        squares += n * n;
        products += n * (v - all(mean));
      }
      group.offer(sum_of(error), scale, min);
      // Least-squares line through the quants; a group with a single quant keeps its own.
      const float centre = sum_of(quants) / count, spread = sum_of(squares) - sum_of(quants) * centre;
      if (spread > 0) step = sum_of(products) / spread;
      low = mean - step * centre;
    }
  }
}

template <class T>
void round_group(const RoundArgs& args, const T* x, int64_t row, int64_t g, Group& group) {
  const WeightTraits& traits = traits_of(args.form.format);
  const int64_t begin = g * group.size, count = std::min<int64_t>(args.form.k - begin, group.size);
  for (int i = 0; i < group.size; ++i) group.values[i] = i < count ? to_float(x[begin + i]) : 0.0f;
  group.is_rounded = false;
  if (traits.bits == 8)
    group.offer(0, half_of(std::fabs(group.farthest()) / 127.0f), {0});
  else
    has_mins(traits.format) ? try_uint4(group) : try_int4(group);
  args.scales.row<f16>(row)[g] = group.scale;
  if (args.mins.data) args.mins.row<f16>(row)[g] = group.min;
  const float least = static_cast<float>(traits.quants.least), most = static_cast<float>(traits.quants.most);
  const Lanes inverted = all(inverse(to_float(group.scale))), shift = all(to_float(group.min));
  for (int i = 0; i < group.size; i += kLanes) {
    const Lanes n = round(clamp((load(group.values + i) + shift) * inverted, least, most));
    std::memcpy(group.values + i, &n, sizeof(n));
  }
  uint8_t* quants = args.values.row<uint8_t>(row) + begin;
  for (int64_t i = 0; i < count; ++i) quants[i] = static_cast<uint8_t>(static_cast<int8_t>(group.values[i]));
}

template <class T>
void round_whole_row(const RoundArgs& args, const T* x, int64_t row) {
  const int64_t count = args.form.num_quants();
  float most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(to_float(x[i])));
  const float scale = most / 127.0f, inverted = inverse(scale);
  *args.scales.row<float>(row) = scale;
  uint8_t* quants = args.values.row<uint8_t>(row);
  for (int64_t i = 0; i < count; ++i) {
    const Lanes n = round(clamp(all(to_float(x[i]) * inverted), -127, 127));
    quants[i] = static_cast<uint8_t>(static_cast<int8_t>(n[0]));
  }
}

struct Steps {
  float step = 1, base = 0, inverted = 1;
  float last = 15;  // the quant of the last byte

  Steps() = default;
  Steps(float own_step, float own_base)
      : step(own_step),
        base(own_base),
        inverted(1.0f / own_step),
        last(std::min(std::floor((127.0f - own_base) / own_step), 15.0f)) {}

  Lanes quants(const float* values) const { return round(clamp((load(values) - all(base)) * all(inverted), 0, last)); }
};

// Returns the steps with the least squared error among several, each with a base fitted to its quants.
Steps best_steps(const float* values, int size) {
  const auto [least, most] = std::minmax_element(values, values + size);
  Lanes total = all(0);
  for (int i = 0; i < size; i += kLanes) total += load(values + i);
  const float mean = sum_of(total) / static_cast<float>(size), widest = std::ceil((*most - *least) / 15.0f);
  Steps best;
  float least_error = INFINITY;
  for (int less = 0; less < 4; ++less) {
    if (less > 0 && widest - static_cast<float>(less) < 1.0f) break;  // 1 is the least
    const float step = std::max(widest - static_cast<float>(less), 1.0f);
    float base = (*least + *most) * 0.5f - 7.5f * step;
    for (int fit = 0; fit < 3; ++fit) {
      const Steps own(step, std::min(std::max(std::nearbyint(base), -127.0f), 127.0f));
      Lanes error = all(0), quants = all(0);
      for (int i = 0; i < size; i += kLanes) {
        const Lanes n = own.quants(values + i), apart = load(values + i) - (n * all(own.step) + all(own.base));
        error += apart * apart;
        quants += n;
      }
      if (sum_of(error) < least_error) {
        least_error = sum_of(error);
        best = own;
      }
      base = mean - step * sum_of(quants) / static_cast<float>(size);
    }
  }
  return best;
}

// Rounds a rotated row, with a scale that maps its extreme to 127.
void round_in_steps(const RoundArgs& args, float* rotated, int64_t row) {
  const int size = static_cast<int>(args.form.group_size);
  const int64_t depth = args.form.depth(), num_groups = args.form.num_groups();
  float most = 0;
  for (int64_t i = 0; i < depth; ++i) most = std::max(most, std::fabs(rotated[i]));
  const float scale = most / 127.0f, inverted = inverse(scale);
  for (int64_t i = 0; i < depth; ++i) rotated[i] *= inverted;
  *args.scales.row<float>(row) = scale;
  uint8_t *quants = args.values.row<uint8_t>(row), *steps = args.steps.row<uint8_t>(row);
  for (int64_t g = 0; g < num_groups; ++g) {
    const Steps best = best_steps(rotated + g * size, size);
    steps[g] = static_cast<uint8_t>(best.step);
    steps[num_groups + g] = static_cast<uint8_t>(static_cast<int8_t>(best.base));
    for (int i = 0; i < size; i += kLanes) {
      const Lanes n = best.quants(rotated + g * size + i);
      for (int lane = 0; lane < kLanes; ++lane) quants[g * size + i + lane] = static_cast<uint8_t>(n[lane]);
    }
  }
}

// Divided by the size of the rotation, so that products with rotated rows equal those of the originals.
template <class T>
void round_rotated_row(const RoundArgs& args, const T* x, int64_t row) {
  const int64_t k = args.form.k, depth = args.form.depth();
  float* rotated = static_cast<float*>(thread_scratch(static_cast<size_t>(depth) * sizeof(float)));
  const float part = 1.0f / static_cast<float>(rotation_size(depth));
  for (int64_t i = 0; i < depth; ++i) rotated[i] = i < k ? to_float(x[i]) * part : 0.0f;
  rotate(rotated, depth);
  has_steps(args.form.format) ? round_in_steps(args, rotated, row) : round_whole_row(args, rotated, row);
}

template <class T>
void round_row(const RoundArgs& args, int64_t row) {
  const T* x = args.weight.row<T>(row);
  if (is_rotated(args.form.format)) return round_rotated_row(args, x, row);
  if (args.form.group_size == 0) return round_whole_row(args, x, row);
  Group group;
  group.size = static_cast<int>(args.form.group_size);
  for (int64_t g = 0; g < args.form.num_groups(); ++g) round_group(args, x, row, g, group);
}

}  // namespace

void round_weight(const RoundArgs& args) {
  constexpr int64_t kRows = 8;  // per task: some 100 us
  parallel_for(ceil_div(args.form.n, kRows), [&](int64_t task) {
    for (int64_t row = task * kRows; row < std::min((task + 1) * kRows, args.form.n); ++row)
      args.weight.dtype == DType::bf16 ? round_row<bf16>(args, row) : round_row<float>(args, row);
  });
}

}  // namespace tilewright
