// Packed linear of every level against plain loops in double, at odd sizes, between guard pages.
#include "kernels/linear/linear.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/half.h"
#include "base/rotate.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Size {
  int64_t m, n, k;
};

constexpr Size kSizes[] = {{1, 2, 1},    {1, 34, 33},   {3, 66, 31},  {16, 32, 64},
                           {17, 30, 95}, {33, 100, 40}, {70, 48, 257}};

double silu(double x) { return x / (1.0 + std::exp(-x)); }

// Tolerance of a product in fp16, relative to its sum: six times the error for random numbers.
constexpr double kHalvesError = 0.004;

template <class TX, class TW, class TY>
void check_linear(Size size, Edge edge, bool gated, WeightLayout layout) {
  const auto [m, n, k] = size;
  const int64_t columns = gated ? n / 2 : n;
  PackedWeight form = {.format = kFormatOf<TW>, .layout = layout, .n = n, .k = k, .gated = gated};
  Random random(static_cast<uint64_t>(m * n + k));
  GuardedBuffer<TX> x(m * k, edge);
  GuardedBuffer<TW> weight(n * k, edge), packed(form.elements(), edge);
  GuardedBuffer<float> bias(form.num_strips() * kStripColumns, edge);
  GuardedBuffer<TY> residual(m * columns, edge), y(m * columns, edge);
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  residual.fill(random);
  form.data = packed.data();
  pack_weight({rows_of(weight, k), form});

  // Column c of a strip and the row of W it holds: plain strips are 32 rows, gated ones 16 of gate and 16 of up.
  auto sum = [&](int64_t row, int64_t out, bool up) {
    const int64_t strip = out / (gated ? kTileColumns : kStripColumns),
                  within = out % (gated ? kTileColumns : kStripColumns);
    double total = bias[strip * kStripColumns + (up ? kTileColumns : 0) + within];
    for (int64_t i = 0; i < k; ++i)
      total += double{to_float(x[row * k + i])} * to_float(weight[(out + (up ? n / 2 : 0)) * k + i]);
    return total;
  };
  std::vector<double> expected;
  for (int64_t row = 0; row < m; ++row)
    for (int64_t out = 0; out < columns; ++out)
      expected.push_back((gated ? silu(sum(row, out, false)) * sum(row, out, true) : silu(sum(row, out, false))) +
                         to_float(residual[row * columns + out]));

  LinearArgs args = {};
  args.x = rows_of(x, k);
  args.weight = form;
  args.bias = bias.data();
  args.residual = rows_of(residual, columns);
  args.y = rows_of(y, columns);
  args.m = m;
  args.activation = Activation::silu;
  linear(args);
  const bool in_halves = layout == WeightLayout::halves && kIsBf16<TX>;
  // Sums are at most about 5; with a gate both factors have this error, times the other.
  const double halves_tolerance = (gated ? 3 : 1) * 5 * kHalvesError;
  check_close(y.data(), expected.data(), m * columns, in_halves ? halves_tolerance : 1e-4,
              "linear " + std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
}

// Layouts in which the active level reads bf16 weights.
std::vector<WeightLayout> layouts() {
  const WeightLayout own = layout_of(WeightFormat::bf16);
  if (own == WeightLayout::tiles) return {own};
  return {own, WeightLayout::tiles};
}

TEST(linear) {
  for_each_isa([] {
    for (const Size& size : kSizes)
      for (Edge edge : {Edge::end, Edge::start})
        for (bool gated : {false, true}) {
          check_linear<float, float, float>(size, edge, gated, WeightLayout::tiles);
          check_linear<bf16, float, bf16>(size, edge, gated, WeightLayout::tiles);
          for (const WeightLayout layout : layouts()) {
            check_linear<float, bf16, float>(size, edge, gated, layout);
            check_linear<bf16, bf16, bf16>(size, edge, gated, layout);
            check_linear<bf16, bf16, float>(size, edge, gated, layout);
          }
        }
  });
}

// A row of 70 has the same bits as the row alone, and as in any smaller batch, whose kernels may differ.
template <class T>
void check_rows_alone(WeightLayout layout) {
  constexpr int64_t m = 70, n = 40, k = 603;
  Random random(3);
  PackedWeight form = {.format = kFormatOf<T>, .layout = layout, .n = n, .k = k};
  GuardedBuffer<T> x(m * k), weight(n * k), packed(form.elements());
  GuardedBuffer<float> together(m * n), alone(m * n);
  x.fill(random);
  weight.fill(random);
  form.data = packed.data();
  pack_weight({rows_of(weight, k), form});
  LinearArgs args = {};
  args.weight = form;
  const auto multiply = [&](int64_t row, int64_t rows, const GuardedBuffer<float>& y) {
    args.x = rows_of(x, k).from(row);
    args.y = rows_of(y, n).from(row);
    args.m = rows;
    linear(args);
  };
  multiply(0, m, together);
  for (int64_t batch : {1, 2, 3, 4, 5, 8, 13, 33}) {
    alone.poison();
    for (int64_t row = 0; row < m; row += batch) multiply(row, std::min(batch, m - row), alone);
    CHECK(std::memcmp(together.data(), alone.data(), m * n * sizeof(float)) == 0);
  }
}

TEST(a_row_does_not_depend_on_the_rows_beside_it) {
  for_each_isa([] {
    check_rows_alone<float>(WeightLayout::tiles);
    for (const WeightLayout layout : layouts()) check_rows_alone<bf16>(layout);
  });
}

// Rows whose largest values are far apart, in x and in W, beside a row of zeros: the range of fp16 is much smaller than
// that of bf16.
TEST(any_range_of_values) {
  constexpr int64_t m = 6, n = 40, k = 130;
  for_each_isa([] {
    for (const WeightLayout layout : layouts()) {
      Random random(4);
      PackedWeight form = {.format = WeightFormat::bf16, .layout = layout, .n = n, .k = k};
      GuardedBuffer<bf16> x(m * k), weight(n * k), packed(form.elements());
      GuardedBuffer<float> y(m * n);
      x.fill(random);
      weight.fill(random);
      const auto scale = [](bf16& value, int exponent) { value = to_bf16(std::ldexp(to_float(value), exponent)); };
      for (int64_t i = 0; i < m * k; ++i) scale(x[i], static_cast<int>(i / k) * 20 - 60);
      for (int64_t i = 0; i < n * k; ++i) scale(weight[i], static_cast<int>(i / k) - 20);
      for (int64_t i = 0; i < k; ++i) x[2 * k + i] = weight[7 * k + i] = bf16{};
      form.data = packed.data();
      pack_weight({rows_of(weight, k), form});
      LinearArgs args = {};
      args.x = rows_of(x, k);
      args.weight = form;
      args.y = rows_of(y, n);
      args.m = m;
      linear(args);
      for (int64_t row = 0; row < m; ++row)
        for (int64_t column = 0; column < n; ++column) {
          double sum = 0, size = 0;
          for (int64_t i = 0; i < k; ++i) {
            const double product = double{to_float(x[row * k + i])} * to_float(weight[column * k + i]);
            sum += product;
            size += product * product;
          }
          const double allowed = layout == WeightLayout::halves ? kHalvesError : 1e-4;
          CHECK(std::fabs(y[row * n + column] - sum) <= allowed * std::sqrt(size));
        }
    }
  });
}

TEST(infinity_and_nan_stay) {
  constexpr int64_t k = 40;
  for_each_isa([] {
    for (const WeightLayout layout : layouts()) {
      PackedWeight form = {.format = WeightFormat::bf16, .layout = layout, .n = 32, .k = k};
      GuardedBuffer<bf16> x(3 * k), weight(32 * k), packed(form.elements());
      GuardedBuffer<float> y(3 * 32);
      Random random(5);
      x.fill(random);
      for (int64_t i = 0; i < 32 * k; ++i) weight[i] = to_bf16(0.5f);
      x[7] = to_bf16(std::numeric_limits<float>::infinity());
      x[k + 7] = to_bf16(std::numeric_limits<float>::quiet_NaN());
      form.data = packed.data();
      pack_weight({rows_of(weight, k), form});
      LinearArgs args = {};
      args.x = rows_of(x, k);
      args.weight = form;
      args.y = rows_of(y, 32);
      args.m = 3;
      linear(args);
      for (int64_t i = 0; i < 32; ++i) CHECK(std::isinf(y[i]) && std::isnan(y[32 + i]) && std::isfinite(y[64 + i]));
    }
  });
}

TEST(unpack_gives_back_the_weight) {
  for (const WeightLayout layout : {WeightLayout::tiles, WeightLayout::halves}) {
    Random random(1);
    PackedWeight form = {.format = WeightFormat::bf16, .layout = layout, .n = 70, .k = 33};
    GuardedBuffer<bf16> weight(70 * 33), back(70 * 33), packed(form.elements());
    const int64_t scales = layout == WeightLayout::halves ? 3 * 64 : 0;
    CHECK(form.elements() == 3 * 2 * 2 * kTileElements + scales);
    form.data = packed.data();
    weight.fill(random);
    pack_weight({rows_of(weight, 33), form});
    unpack_weight({rows_of(back, 33), form});
    CHECK(std::memcmp(weight.data(), back.data(), 70 * 33 * 2) == 0);
  }
}

// A quantised weight [n, k] with all its parts.
struct Quantized {
  Quantized(WeightFormat format, int64_t group_size, int64_t n, int64_t k, bool gated, Edge edge, Random& random)
      : form{.group_size = group_size, .format = format, .n = n, .k = k, .gated = gated},
        values(n * form.num_quants(), edge),
        data(form.elements(), edge),
        scales(n * form.num_groups() * 4, edge),
        mins(n * form.num_groups() * 4, edge),
        steps(n * form.num_groups() * 2, edge),
        packed_scales(form.num_scales() * static_cast<int64_t>(size_of(form.scale_dtype())), edge) {
    const auto [least, most] = traits_of(format).quants;
    const auto count = static_cast<uint64_t>(most - least + 1);
    for (int64_t i = 0; i < n * form.num_quants(); ++i) {
      values[i] = static_cast<uint8_t>(least + static_cast<int>(random.bits() % count));
      if (format == WeightFormat::fp8 && (values[i] & 0x7f) == 0x7f) values[i] = 3;  // NaN
    }
    // Whole steps and bases: base + 15 * step is 127 at most.
    for (int64_t i = 0; i < steps.size(); ++i) {
      const bool is_base = i % (2 * form.num_groups()) >= form.num_groups();
      steps[i] = static_cast<uint8_t>(is_base ? random.bits() % 130 - 127 : 1 + random.bits() % 8);
    }
    fill_scales(scales, 0.001f, random);
    fill_scales(mins, 0.01f, random);
    form.data = data.data();
    form.scales = packed_scales.data();
    const int64_t groups = form.num_groups();
    pack_weight({{values.data(), form.num_quants(), DType::u8},
                 form,
                 {scales.data(), has_steps(format) ? 1 : groups, scale_dtype()},
                 {has_mins(format) ? mins.data() : nullptr, groups, scale_dtype()},
                 {steps.data(), 2 * groups, DType::u8}});
  }

  // Type of unpacked scales.
  DType scale_dtype() const { return has_steps(form.format) ? DType::f32 : form.scale_dtype(); }

  // Fills in scales: fp16 as 1.m x 2^-7 to 2^-9, or fp32.
  void fill_scales(const GuardedBuffer<uint8_t>& to, float size, Random& random) {
    for (int64_t i = 0; i < form.n * form.num_groups(); ++i) {
      const auto half = static_cast<uint16_t>((6 + random.bits() % 3) << 10 | random.bits() % 1024);
      const float wide = size * (1.5f + random.value());
      if (scale_dtype() == DType::f16)
        std::memcpy(to.data() + 2 * i, &half, 2);
      else
        std::memcpy(to.data() + 4 * i, &wide, 4);
    }
  }
  float scale(const GuardedBuffer<uint8_t>& from, int64_t row, int64_t group) const {
    const int64_t i = row * form.num_groups() + group;
    f16 half;
    float wide;
    if (scale_dtype() == DType::f16) {
      std::memcpy(&half, from.data() + 2 * i, 2);
      return to_float(half);
    }
    std::memcpy(&wide, from.data() + 4 * i, 4);
    return wide;
  }
  int64_t group_of(int64_t i) const { return form.group_size ? i / form.group_size : 0; }
  // Value of a quant; for rotated rows, in the rotated one.
  double value(int64_t row, int64_t i) const {
    const uint8_t code = values[row * form.num_quants() + i];
    if (has_steps(form.format)) {
      const int64_t step = row * 2 * form.num_groups() + group_of(i);
      float own;
      std::memcpy(&own, scales.data() + 4 * row, 4);
      return own * (static_cast<int8_t>(steps[step + form.num_groups()]) + static_cast<double>(steps[step]) * code);
    }
    const double own_scale = scale(scales, row, group_of(i));
    if (form.format == WeightFormat::fp8) return own_scale * fp8(code);
    const int8_t* table = traits_of(form.format).table;
    const double whole = own_scale * (table ? table[code] : static_cast<int8_t>(code));
    if (!has_mins(form.format)) return whole;
    const double min = scale(mins, row, group_of(i));
    return whole - (has_zeros(form.format) ? own_scale * min : min);
  }
  // Value in the original row: the rotation is Hadamard's, of values depth / size apart.
  double turned_back(int64_t row, int64_t i) const {
    if (!is_rotated(form.format)) return value(row, i);
    const int64_t width = form.depth() / rotation_size(form.depth());
    double sum = 0;
    for (int64_t j = i % width; j < form.depth(); j += width)
      sum += std::popcount(static_cast<uint64_t>((i / width) & (j / width))) % 2 ? -value(row, j) : value(row, j);
    return sum;
  }
  // e4m3 by its definition.
  static double fp8(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return code & 0x80 ? -magnitude : magnitude;
  }

  PackedWeight form;
  GuardedBuffer<uint8_t> values, data, scales, mins, steps, packed_scales;
};

// x as quantised products round it: [m, num_quants()].
template <class T>
std::vector<double> rounded(const GuardedBuffer<T>& x, int64_t m, const PackedWeight& form) {
  const int64_t count = form.num_quants();
  const int64_t group = form.group_size && !has_steps(form.format) ? form.group_size : count;
  std::vector<double> result;
  for (int64_t row = 0; row < m; ++row) {
    std::vector<float> own(static_cast<size_t>(count));
    for (int64_t i = 0; i < form.k; ++i) own[static_cast<size_t>(i)] = to_float(x[row * form.k + i]);
    if (is_rotated(form.format)) rotate(own.data(), count);
    for (int64_t i = 0; i < count; ++i) {
      const auto begin = own.begin() + i / group * group;
      const auto end = own.begin() + std::min((i / group + 1) * group, count);
      float most = 0.0f;
      for (auto value = begin; value < end; ++value) most = std::max(most, std::abs(*value));
      const float value = own[static_cast<size_t>(i)];
      const bool is_kept = !rounds_x(form.format) || most == 0.0f;
      result.push_back(is_kept ? double{value} : double{std::nearbyintf(value * (127.0f / most))} * (most / 127.0f));
    }
  }
  return result;
}

TEST(rotated_twice_is_the_row_times_the_size) {
  Random random(8);
  for (int64_t depth : {64, 128, 192, 256, 576, 896, 1024, 4864}) {
    GuardedBuffer<float> row(depth), back(depth);
    row.fill(random);
    std::memcpy(back.data(), row.data(), static_cast<size_t>(depth) * sizeof(float));
    rotate(back.data(), depth);
    double before = 0, after = 0;
    for (int64_t i = 0; i < depth; ++i) {
      before += double{row[i]} * row[i];
      after += double{back[i]} * back[i];
    }
    const auto size = static_cast<double>(rotation_size(depth));
    CHECK(std::abs(after / (before * size) - 1) < 1e-5);
    rotate(back.data(), depth);
    for (int64_t i = 0; i < depth; ++i) CHECK(std::abs(back[i] / size - row[i]) < 1e-5);
  }
}

struct QuantizedCase {
  WeightFormat format;
  int64_t group_size;
};

constexpr QuantizedCase kQuantizedCases[] = {
    {WeightFormat::int8, 0},         {WeightFormat::int8, 16},         {WeightFormat::int8, 128},
    {WeightFormat::int8_min, 16},    {WeightFormat::int8_min, 128},    {WeightFormat::int4, 32},
    {WeightFormat::int4, 64},        {WeightFormat::int4, 128},        {WeightFormat::uint4, 32},
    {WeightFormat::uint4, 128},      {WeightFormat::uint4_zero, 32},   {WeightFormat::uint4_zero, 128},
    {WeightFormat::mxfp4, 32},       {WeightFormat::mxfp4, 64},        {WeightFormat::iq4_nl, 32},
    {WeightFormat::iq4_nl, 128},     {WeightFormat::fp8, 0},           {WeightFormat::fp8, 128},
    {WeightFormat::fp8, 32},         {WeightFormat::int8_exact, 0},    {WeightFormat::int8_exact, 64},
    {WeightFormat::int8_rotated, 0}, {WeightFormat::int4_rotated, 16}, {WeightFormat::int4_rotated, 32}};

template <class TX, class TY>
void check_quantized(QuantizedCase which, Size size, Edge edge, bool gated) {
  const auto [m, n, k] = size;
  const int64_t columns = gated ? n / 2 : n;
  Random random(static_cast<uint64_t>(m * n + k));
  const Quantized weight(which.format, which.group_size, n, k, gated, edge, random);
  GuardedBuffer<TX> x(m * k, edge);
  GuardedBuffer<TY> residual(m * columns, edge), y(m * columns, edge);
  x.fill(random);
  residual.fill(random);
  const std::vector<double> left = rounded(x, m, weight.form);
  const auto sum = [&](int64_t row, int64_t out) {
    double total = 0;
    const int64_t count = weight.form.num_quants();
    for (int64_t i = 0; i < count; ++i) total += left[static_cast<size_t>(row * count + i)] * weight.value(out, i);
    return total;
  };
  std::vector<double> expected;
  for (int64_t row = 0; row < m; ++row)
    for (int64_t out = 0; out < columns; ++out)
      expected.push_back((gated ? silu(sum(row, out)) * sum(row, n / 2 + out) : silu(sum(row, out))) +
                         to_float(residual[row * columns + out]));
  LinearArgs args = {};
  args.x = rows_of(x, k);
  args.weight = weight.form;
  args.residual = rows_of(residual, columns);
  args.y = rows_of(y, columns);
  args.m = m;
  args.activation = Activation::silu;
  for_each_isa([&] {
    y.poison();
    linear(args);
    check_close(y.data(), expected.data(), m * columns, 1e-4,
                std::string(name_of(which.format)) + " in groups of " + std::to_string(which.group_size) + ", " +
                    std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
  });
}

TEST(quantized_linear) {
  for (const QuantizedCase& which : kQuantizedCases)
    for (const Size& size : kSizes)
      for (Edge edge : {Edge::end, Edge::start}) {
        check_quantized<float, float>(which, size, edge, false);
        check_quantized<bf16, bf16>(which, size, edge, true);
      }
}

// A row has the same bits alone, in any batch, and at each level that has fused multiply-adds.
TEST(a_row_of_a_quantized_product_does_not_depend_on_the_rows_beside_it) {
  constexpr int64_t m = 70, n = 40, k = 203;
  for (const QuantizedCase& which : kQuantizedCases) {
    Random random(3);
    const Quantized weight(which.format, which.group_size, n, k, false, Edge::end, random);
    GuardedBuffer<float> x(m * k), together(m * n), alone(m * n);
    x.fill(random);
    LinearArgs args = {};
    args.weight = weight.form;
    const auto multiply = [&](int64_t row, int64_t rows, const GuardedBuffer<float>& y) {
      args.x = rows_of(x, k).from(row);
      args.y = rows_of(y, n).from(row);
      args.m = rows;
      linear(args);
    };
    for_each_isa([&] {
      multiply(0, m, together);
      for (int64_t batch : {1, 2, 3, 5, 13, 33}) {
        alone.poison();
        for (int64_t row = 0; row < m; row += batch) multiply(row, std::min(batch, m - row), alone);
        CHECK(std::memcmp(together.data(), alone.data(), m * n * sizeof(float)) == 0);
      }
    });
  }
}

// Columns of x in another order, as those of the weight are.
TEST(columns_of_x_in_the_order_of_the_weight) {
  constexpr int64_t m = 18, n = 40, k = 133;
  Random random(4);
  const Quantized weight(WeightFormat::int4, 32, n, k, false, Edge::end, random);
  GuardedBuffer<bf16> x(m * k), moved(m * k);
  GuardedBuffer<int32_t> columns(k);
  GuardedBuffer<float> expected(m * n), y(m * n);
  x.fill(random);
  for (int64_t i = 0; i < k; ++i) columns[i] = static_cast<int32_t>(i * 50 % k);
  for (int64_t row = 0; row < m; ++row)
    for (int64_t i = 0; i < k; ++i) moved[row * k + columns[i]] = x[row * k + i];
  LinearArgs args = {};
  args.weight = weight.form;
  args.m = m;
  for_each_isa([&] {
    args.x = rows_of(x, k);
    args.y = rows_of(expected, n);
    args.x_columns = nullptr;
    linear(args);
    args.x = rows_of(moved, k);
    args.y = rows_of(y, n);
    args.x_columns = columns.data();
    linear(args);
    CHECK(std::memcmp(expected.data(), y.data(), m * n * sizeof(float)) == 0);
  });
}

TEST(a_quantized_product_of_nan_is_nan) {
  Random random(5);
  const Quantized weight(WeightFormat::int4, 32, 8, 100, false, Edge::end, random);
  GuardedBuffer<float> x(2 * 100), y(2 * 8);
  LinearArgs args = {};
  args.x = rows_of(x, 100);
  args.weight = weight.form;
  args.y = rows_of(y, 8);
  args.m = 2;
  for_each_isa([&] {
    for (const float broken : {NAN, INFINITY}) {
      x.fill(random);
      x[70] = broken;
      linear(args);
      for (int i = 0; i < 8; ++i) CHECK(std::isnan(y[i]) && !std::isnan(y[8 + i]));
    }
    x.fill(random, 0.0f);
    linear(args);
    for (int i = 0; i < 16; ++i) CHECK(y[i] == 0.0f);
  });
}

TEST(unpack_gives_what_quants_stand_for) {
  for (const QuantizedCase& which : kQuantizedCases)
    for (bool gated : {false, true}) {
      Random random(7);
      const Quantized weight(which.format, which.group_size, 70, 133, gated, Edge::end, random);
      GuardedBuffer<float> back(70 * 133);
      unpack_weight({rows_of(back, 133), weight.form});
      std::vector<double> expected;
      for (int64_t row = 0; row < 70; ++row)
        for (int64_t i = 0; i < 133; ++i) expected.push_back(weight.turned_back(row, i));
      check_close(back.data(), expected.data(), 70 * 133, is_rotated(which.format) ? 1e-5 : 1e-6,
                  name_of(which.format));
    }
}

}  // namespace
}  // namespace tilewright::testing
