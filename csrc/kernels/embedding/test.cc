// Gathers and scatters of rows at every ISA level, between guard pages.
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/tile.h"
#include "kernels/embedding/embedding.h"
#include "kernels/linear/linear.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kVocabulary = 70, kIds = 9;

template <class T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
void check_embedding(int64_t width, Edge edge) {
  Random random(static_cast<uint64_t>(width));
  const int64_t depth_tiles = ceil_div(width, kTileDepth);
  GuardedBuffer<T> table(kVocabulary * width, edge);
  GuardedBuffer<T> packed(round_up(kVocabulary, kStripColumns) * round_up(width, kTileDepth), edge);
  GuardedBuffer<int32_t> ids(kIds, edge);
  GuardedBuffer<T> out(kIds * (width + 1) - 1, edge);
  table.fill(random);
  for (int64_t n = 0; n < kVocabulary; ++n)
    for (int64_t k = 0; k < width; ++k) packed[packed_offset<T>(n, k, depth_tiles)] = table[n * width + k];
  for (int64_t i = 0; i < kIds; ++i) ids[i] = static_cast<int32_t>(i * 31 % kVocabulary);
  ids[kIds - 1] = kVocabulary - 1;
  // The ends of the part below, and their neighbours.
  for (auto [place, id] : {std::pair<int64_t, int32_t>{1, 22}, {2, 23}, {3, 62}, {4, 63}}) ids[place] = id;

  EmbeddingArgs args;
  args.ids = ids.data();
  args.id_dtype = DType::i32;
  args.out = rows_of(out, width + 1);
  args.count = kIds;
  args.width = width;
  PackedWeight plain = {.format = kFormatOf<T>, .n = kVocabulary, .k = width}, tiles = plain, halves = plain;
  tiles.data = packed.data();
  halves.layout = WeightLayout::halves;
  GuardedBuffer<bf16> packed_halves(halves.elements(), edge);
  halves.data = packed_halves.data();
  std::vector<PackedWeight> kinds = {plain, tiles};
  if (kIsBf16<T>) {
    pack_weight({rows_of(table, width), halves});
    kinds.push_back(halves);
  }
  for (const PackedWeight& kind : kinds)
    for (auto [first, num_rows] : {std::pair<int64_t, int64_t>{0, kVocabulary}, {23, 40}}) {  // all, or a rank's part
      out.poison();
      args.table = rows_of(table, width);
      args.packed = kind;
      args.first = first;
      args.num_rows = num_rows;
      embedding(args);
      for (int64_t i = 0; i < kIds; ++i) {
        const int64_t row = ids[i] - first;
        for (int64_t k = 0; k < width; ++k)
          CHECK(same(out[i * (width + 1) + k], row >= 0 && row < num_rows ? table[row * width + k] : T{}));
        if (i) CHECK(std::isnan(to_float(out[i * (width + 1) - 1])));
      }
    }
}

template <class T>
void check_scatter(int64_t width, Edge edge, bool accumulate) {
  Random random(static_cast<uint64_t>(width));
  constexpr int64_t kTokens = 7, kValues = 3;
  GuardedBuffer<T> out(kTokens * width, edge), before(kTokens * width, edge), values(kValues * width, edge);
  GuardedBuffer<int64_t> rows(kValues, edge);
  out.fill(random);
  values.fill(random);
  std::memcpy(before.data(), out.data(), static_cast<size_t>(kTokens * width) * sizeof(T));
  for (int64_t i = 0; i < kValues; ++i) rows[i] = kTokens - 1 - 3 * i;  // 6, 3, 0

  ScatterArgs args;
  args.rows = rows.data();
  args.values = rows_of(values, width);
  args.out = rows_of(out, width);
  args.count = kValues;
  args.width = width;
  args.accumulate = accumulate;
  scatter_rows(args);
  for (int64_t token = 0; token < kTokens; ++token)
    for (int64_t k = 0; k < width; ++k) {
      T expected = before[token * width + k];
      if (token % 3 == 0) {
        const T value = values[(kTokens - 1 - token) / 3 * width + k];
        assign(expected, (accumulate ? to_float(expected) : 0.0f) + to_float(value));
      }
      CHECK(same(out[token * width + k], expected));
    }
}

TEST(rows_are_gathered_and_scattered) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t width : {1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100}) {
        check_embedding<float>(width, edge);
        check_embedding<bf16>(width, edge);
        for (bool accumulate : {false, true}) {
          check_scatter<float>(width, edge, accumulate);
          check_scatter<bf16>(width, edge, accumulate);
        }
      }
  });
}

TEST(bad_numbers_are_found) {
  const int64_t ids[] = {0, 4, 5, -1};
  CHECK(first_out_of_range(ids, DType::i64, 2, 5) == -1);
  CHECK(first_out_of_range(ids, DType::i64, 4, 5) == 2);
  CHECK(first_out_of_range(ids, DType::i64, 4, 6) == 3);
  CHECK(first_out_of_range(ids, DType::i64, 4, 6, -1) == -1);
  CHECK(first_out_of_range(ids, DType::i64, 4, 5, -1) == 2);
  const int64_t rows[] = {3, 1, 0, 1};
  CHECK(first_repeated(rows, 3, 4) == -1);
  CHECK(first_repeated(rows, 4, 4) == 3);
}

}  // namespace
}  // namespace tilewright::testing
