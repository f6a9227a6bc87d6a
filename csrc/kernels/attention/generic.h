// Attention of an item in terms of Vec and of tile products. Include after a Vec and after `Products`:
//
//   template <class T> struct Products {        T: type of keys and values
//     using Left = ...;                         type of the left operand: queries, then softmax weights
//     explicit Products(int rows);              whatever the products need for blocks of `rows` rows
//     void multiply(const Left* a, int64_t lda, int rows, PagedTiles<T>, int column_tiles, int depth_tiles, float* c,
//                   int64_t ldc);
//   };
#pragma once

#include <optional>
#include <type_traits>

#include "base/half.h"
#include "base/kv_bytes.h"
#include "base/scratch.h"
#include "kernels/attention/block_tiles.h"
#include "kernels/attention/pack.h"
#include "kernels/attention/softmax.h"

namespace tilewright {
namespace {

// Rows of scores are a cache line more than a block apart: at 2 KB apart, 32 rows would share two sets of the L1 cache.
inline constexpr int kScoreStride = kKeyBlock + 16;

// Working memory within the thread's scratch: what a block needs, and what each of the current items keeps.
template <class T>
struct Workspace {
  using Left = typename Products<T>::Left;
  int64_t key_depth, value_width;  // padded head widths
  float* scores[2];                // [kQueryRows, kScoreStride] of this block and the next; weights take their place
  float* block_output;             // [kQueryRows, value_width]
  T* last_values;                  // one row of value tiles, for the tokens that do not fill a tile
  T* decoded;                      // tiles of keys or values decoded from bytes
  Left* queries;                   // [kQueryRows, key_depth]
  float* output;                   // [kQueryRows, value_width]

  explicit Workspace(const KvLayout& layout) : Workspace(layout, thread_scratch(bytes(layout, 1)), 0) {}
  Workspace(const KvLayout& layout, void* memory, int item)
      : key_depth(layout.key_depth_tiles() * kTileDepth), value_width(layout.value_column_tiles() * kTileColumns) {
    char* p = static_cast<char*>(memory);
    auto take = [&](int64_t bytes) { return p += bytes, p - bytes; };
    for (float*& block : scores) block = reinterpret_cast<float*>(take(kQueryRows * kScoreStride * 4));
    block_output = reinterpret_cast<float*>(take(kQueryRows * value_width * 4));
    last_values = reinterpret_cast<T*>(take(kTileDepth * value_width * 4));
    decoded = reinterpret_cast<T*>(take(decoded_bytes(layout)));
    take(item * own_bytes(layout));
    queries = reinterpret_cast<Left*>(take(kQueryRows * key_depth * 4));
    output = reinterpret_cast<float*>(take(kQueryRows * value_width * 4));
  }

  // Bytes for `num_items` items.
  static int64_t bytes(const KvLayout& layout, int num_items) {
    const int64_t width = layout.value_column_tiles() * kTileColumns;
    return kQueryRows * (kScoreStride * 8 + width * 4) + kTileDepth * width * 4 + decoded_bytes(layout) +
           num_items * own_bytes(layout);
  }

  // Bytes for keys of 32 tokens, or two columns of value tiles of a whole block.
  static int64_t decoded_bytes(const KvLayout& layout) {
    if (layout.format == KvFormat::same) return 0;
    const int64_t key_tiles = 2 * layout.key_depth_tiles(), value_tiles = 2 * kKeyBlock / kTileDepth;
    return (key_tiles > value_tiles ? key_tiles : value_tiles) * kTileElements * 2;
  }

  static int64_t own_bytes(const KvLayout& layout) {
    return kQueryRows * 4 * (layout.key_depth_tiles() * kTileDepth + layout.value_column_tiles() * kTileColumns);
  }

  // Softmax weights, of type Left, overwrite their scores, at the stride of the scores.
  static constexpr int64_t kWeightStride = kScoreStride * sizeof(float) / sizeof(Left);
};

// Token and head of a row's query and output.
struct RowPlace {
  int64_t token, head;  // token within its sequence
};

// fn(row, place) for each row of an item. Counting up is cheaper than a division per row and product.
template <class Fn>
inline void for_each_row(const AttentionArgs& args, const AttentionItem& item, Fn fn) {
  const int64_t group = args.group();
  int64_t token = item.row_begin / group, in_group = item.row_begin % group;
  for (int row = 0; row < item.rows; ++row) {
    fn(row, RowPlace{token, item.head * group + in_group});
    if (++in_group == group) in_group = 0, ++token;
  }
}

// Stores a query times `sign` as a left operand [depth], padded with zeros. Returns the factor of its products.
template <class TQ, class Left>
inline float load_query(const TQ* q, int64_t width, int64_t depth, float sign, Left* to) {
  const Vec signs = Vec::set1(sign);
  int64_t i = 0;
  for (; i + Vec::kLanes <= width; i += Vec::kLanes) (Vec::load(q + i) * signs).store(to + i);
  for (; i < depth; i += Vec::kLanes) (Vec::load(q + i, width - i < 0 ? 0 : width - i) * signs).store(to + i);
  return 1.0f;
}

// scales [rows]: factors that turn a row's raw products into exponents of 2.
template <class TQ, class Left>
void load_queries_as(const AttentionArgs& args, const AttentionItem& item, Left* queries, int64_t depth,
                     float* scales) {
  const int64_t first = args.query_starts[item.sequence];
  // The softmax computes the maximum of raw products, so a negative scale flips the sign here.
  const float sign = args.scale < 0 ? -1.0f : 1.0f;
  const float scale = sign * args.scale * kLog2E * args.scales(item.sequence, item.head).keys;
  for_each_row(args, item, [&](int row, const RowPlace& place) {
    const TQ* q = args.q.row<TQ>(first + place.token, place.head);
    scales[row] = scale * load_query(q, args.layout.head_width, depth, sign, queries + row * depth);
  });
}

template <class Left>
void load_queries(const AttentionArgs& args, const AttentionItem& item, Left* queries, int64_t depth, float* scales) {
  if constexpr (!std::is_same_v<Left, f16>)  // queries of fp16 products are bf16 too
    if (args.q.dtype == DType::f32) return load_queries_as<float>(args, item, queries, depth, scales);
  load_queries_as<bf16>(args, item, queries, depth, scales);
}

template <class TQ>
void store_output_as(const AttentionArgs& args, const AttentionItem& item, const Accumulator& result,
                     int64_t value_width) {
  const int64_t first = args.query_starts[item.sequence];
  const int64_t width = args.layout.head_width;
  const float of_values = args.scales(item.sequence, item.head).values;
  for_each_row(args, item, [&](int row, const RowPlace& place) {
    TQ* out = args.out.row<TQ>(first + place.token, place.head);
    // A row that sees no key gives zeros.
    const Vec scale = Vec::set1(result.sum[row] == 0.0f ? 0.0f : of_values / result.sum[row]);
    const float* from = result.output + row * value_width;
    int64_t i = 0;
    for (; i + Vec::kLanes <= width; i += Vec::kLanes) (Vec::load(from + i) * scale).store(out + i);
    if (i < width) (Vec::load(from + i) * scale).store(out + i, width - i);
  });
}

void store_output(const AttentionArgs& args, const AttentionItem& item, const Accumulator& result,
                  int64_t value_width) {
  args.q.dtype == DType::f32 ? store_output_as<float>(args, item, result, value_width)
                             : store_output_as<bf16>(args, item, result, value_width);
}

struct KeyRange {
  int64_t begin, end;
};

inline KeyRange keys_seen(const AttentionArgs& args, int64_t sequence, int64_t token) {
  const int64_t keys = args.kv_lengths[sequence];
  const int64_t queries = args.query_starts[sequence + 1] - args.query_starts[sequence];
  const int64_t position = keys - queries + token;
  KeyRange range = {0, keys};
  if (args.causal) range.end = position + 1;
  if (args.window > 0) {
    if (position - args.window + 1 > range.begin) range.begin = position - args.window + 1;
    if (position + args.window < range.end) range.end = position + args.window;
  }
  if (range.end < 0) range.end = 0;
  return range;
}

// Attention of one item: up to kQueryRows rows against its blocks of keys in turn. T: the type of tiles that are
// multiplied, Stored: that of the pages, which differs if they are bytes.
template <class T, class Stored = T>
class ItemRun {
 public:
  ItemRun(const AttentionArgs& args, const AttentionItem& item, const Workspace<T>& work)
      : args_(args), item_(item), work_(work), products_(item.rows) {
    load_queries(args, item, work_.queries, work_.key_depth, scales_);
    for_each_row(args, item, [&](int row, const RowPlace& place) {
      places_[row] = place;
      seen_[row] = keys_seen(args, item.sequence, place.token);
      if (seen_[row].end > seen_end_) seen_end_ = seen_[row].end;
    });
    Weigher<typename Workspace<T>::Left>::watch_for_nan();
  }

  // For each block, target(block) returns where its partial goes (maxima, sums, output) and done(block) follows. The
  // products of the next block are issued between rows of this block's softmax: they run on other units, and a core
  // that has both available runs both at once.
  template <class Target, class Done>
  void run(Target target, Done done) {
    BlockTiles<Stored> tiles[2];
    int now = 0;
    if (item_.block_begin < item_.block_end) {
      tiles[now] = BlockTiles<Stored>(args_, item_, item_.block_begin, seen_end_, last_values());
      score(tiles[now], 0, tiles[now].num_columns, work_.scores[now]);
    }
    for (int64_t block = item_.block_begin; block < item_.block_end; ++block, now = 1 - now) {
      const BlockTiles<Stored>& current = tiles[now];
      BlockTiles<Stored>& next = tiles[1 - now];
      next.num_columns = 0;
      if (block + 1 < item_.block_end) next = BlockTiles<Stored>(args_, item_, block + 1, seen_end_, last_values());
      const Partial partial = target(block);
      constexpr int kStepKeys = kTileDepth, kSteps = kKeyBlock / kStepKeys, kRowsPerStep = kQueryRows / kSteps;
      for (int step = 0; step < kSteps; ++step) {
        score(next, step * kStepKeys, (step + 1) * kStepKeys, work_.scores[1 - now]);
        for (int row = step * kRowsPerStep; row < (step + 1) * kRowsPerStep && row < item_.rows; ++row)
          softmax(current, block, row, work_.scores[now], partial);
      }
      weigh_values(current, work_.scores[now], partial);
      done(partial);
    }
  }

  // Runs a single block.
  void run_block(int64_t block, const Partial& partial) {
    const BlockTiles<Stored> tiles(args_, item_, block, seen_end_, last_values());
    float* scores = work_.scores[0];
    if (sees_all(tiles, block)) {
      softmax_of_all(tiles, scores, partial);
    } else {
      score(tiles, 0, tiles.num_columns, scores);
      for (int row = 0; row < item_.rows; ++row) softmax(tiles, block, row, scores, partial);
    }
    weigh_values(tiles, scores, partial);
  }

 private:
  // Raw products of all rows with the existing keys of [begin, end) of a block.
  void score(const BlockTiles<Stored>& tiles, int begin, int end, float* scores) {
    if (end > tiles.num_columns) end = tiles.num_columns;
    if (begin >= end) return;
    if constexpr (std::is_same_v<Stored, KvByte>) {
      for (int key = begin; key < end; key += kTileDepth) score_bytes(tiles, key, scores);
      return;
    } else {
      score_tiles(tiles, begin, end, scores);
    }
  }

  void score_tiles(const BlockTiles<T>& tiles, int begin, int end, float* scores) {
    products_.multiply(work_.queries, work_.key_depth, item_.rows,
                       PagedTiles<T>::by_columns(tiles.keys + begin / kTileColumns), (end - begin) / kTileColumns,
                       static_cast<int>(work_.key_depth / kTileDepth), scores + begin, kScoreStride);
  }

  // Scores 32 keys stored as bytes.
  void score_bytes(const BlockTiles<Stored>& tiles, int key, float* scores) {
    const int64_t depth_tiles = work_.key_depth / kTileDepth;
    float scales[kTileDepth];
    tiles.key_scales(key, scales);
    const T* columns[2];
    for (int half = 0; half < 2; ++half) {
      const KvByte* from = tiles.keys[key / kTileColumns + half];
      T* to = work_.decoded + half * depth_tiles * kTileElements;
      columns[half] = to;
      is_fp8() ? decode_key_tiles<KvFormat::fp8>(from, depth_tiles, scales + half * kTileColumns, to)
               : decode_key_tiles<KvFormat::int8>(from, depth_tiles, scales + half * kTileColumns, to);
    }
    products_.multiply(work_.queries, work_.key_depth, item_.rows, PagedTiles<T>::by_columns(columns), 2,
                       static_cast<int>(depth_tiles), scores + key, kScoreStride);
  }

  bool is_fp8() const { return args_.layout.format == KvFormat::fp8; }

  // Whether every row sees all keys of a block, and scores are only scaled.
  bool sees_all(const BlockTiles<Stored>& tiles, int64_t block) const {
    if (args_.mask.data || args_.soft_cap > 0 || tiles.num_columns > tiles.keys_present) return false;
    const int64_t begin = block * kKeyBlock;
    for (int row = 0; row < item_.rows; ++row)
      if (seen_[row].begin > begin || seen_[row].end < begin + tiles.num_columns) return false;
    return true;
  }

  // Turns the scores of such a block into weights. Maxima are computed while a part of the scores is in the L1 cache,
  // and all rows' are known before the first row is weighed: no row waits for its own.
  void softmax_of_all(const BlockTiles<Stored>& tiles, float* scores, const Partial& partial) {
    constexpr int kPart = 128;
    Vec highest[kQueryRows];
    for (Vec& row : highest) row = Vec::set1(kMinusInfinity);
    for (int begin = 0; begin < tiles.num_columns; begin += kPart) {
      const int width = tiles.num_columns - begin < kPart ? tiles.num_columns - begin : kPart;
      score(tiles, begin, begin + width, scores);
      for (int row = 0; row < item_.rows; ++row)
        highest[row] = highest_score(scores + row * kScoreStride + begin, width, highest[row]);
    }
    for (int row = 0; row < item_.rows; ++row) partial.maximum[row] = reduce_max(highest[row]) * scales_[row];
    for (int row = 0; row < item_.rows; ++row) {
      float* at = scores + row * kScoreStride;
      weigh_row(at, tiles.num_columns, scales_[row], reinterpret_cast<typename Workspace<T>::Left*>(at),
                partial.maximum[row], partial.sum + row);
    }
  }

  Stored* last_values() const {
    if constexpr (std::is_same_v<Stored, T>)
      return work_.last_values;
    else
      return nullptr;  // scales of 0 replace missing tokens
  }

  // Multiplies values by the weights in `scores`.
  void weigh_values(const BlockTiles<Stored>& tiles, const float* scores, const Partial& partial) {
    if constexpr (std::is_same_v<Stored, KvByte>)
      weigh_bytes(tiles, scores, partial);
    else
      weigh_tiles(tiles, scores, partial);
  }

  void weigh_bytes(const BlockTiles<Stored>& tiles, const float* scores, const Partial& partial) {
    const int depth_tiles = tiles.num_columns / kTileDepth;
    const int column_tiles = static_cast<int>(work_.value_width / kTileColumns);
    float scales[kKeyBlock];
    const T* depths[kKeyBlock / kTileDepth];
    for (int token = 0; token < tiles.num_columns; token += kTileDepth)
      tiles.value_scales(token, args_.layout.page_size, scales + token);
    for (int column = 0; column < column_tiles; column += 2) {
      const int count = column_tiles - column < 2 ? 1 : 2;
      for (int d = 0; d < depth_tiles; ++d) {
        depths[d] = work_.decoded + d * 2 * kTileElements;
        for (int j = 0; j < count; ++j) {
          const KvByte* from = tiles.values[d] + (column + j) * kTileElements;
          T* to = work_.decoded + (d * 2 + j) * kTileElements;
          is_fp8() ? decode_value_tile<KvFormat::fp8>(from, scales + d * kTileDepth, to)
                   : decode_value_tile<KvFormat::int8>(from, scales + d * kTileDepth, to);
        }
      }
      products_.multiply(reinterpret_cast<const typename Workspace<T>::Left*>(scores), Workspace<T>::kWeightStride,
                         item_.rows, PagedTiles<T>::by_depths(depths), count, depth_tiles,
                         partial.output + column * kTileColumns, work_.value_width);
    }
  }

  void weigh_tiles(const BlockTiles<T>& tiles, const float* scores, const Partial& partial) {
    products_.multiply(reinterpret_cast<const typename Workspace<T>::Left*>(scores), Workspace<T>::kWeightStride,
                       item_.rows, PagedTiles<T>::by_depths(tiles.values),
                       static_cast<int>(work_.value_width / kTileColumns), tiles.num_columns / kTileDepth,
                       partial.output, work_.value_width);
  }

  void softmax(const BlockTiles<Stored>& tiles, int64_t block, int row, float* block_scores, const Partial& partial) {
    const int64_t begin = block * kKeyBlock;
    const KeyRange& seen = seen_[row];
    RowRules rules;
    rules.begin = static_cast<int>(seen.begin <= begin ? 0 : seen.begin - begin);
    rules.end = static_cast<int>(seen.end - begin < tiles.keys_present ? seen.end - begin : tiles.keys_present);
    rules.scale = scales_[row];
    float* scores = block_scores + row * kScoreStride;
    auto* weights = reinterpret_cast<typename Workspace<T>::Left*>(scores);
    const bool plain = !args_.mask.data && args_.soft_cap <= 0 && rules.begin == 0 && rules.end == tiles.num_columns;
    if (plain)
      return softmax_row(scores, tiles.num_columns, rules.scale, weights, partial.maximum + row, partial.sum + row);
    rules.soft_cap = args_.soft_cap * kLog2E;
    rules.mask = mask_at(row, begin);
    rules.mask_dtype = args_.mask.dtype;
    softmax_row_with_rules(scores, tiles.num_columns, rules, weights, partial.maximum + row, partial.sum + row);
  }

  // Mask of a row from a key on, or null.
  const void* mask_at(int row, int64_t key) const {
    const AttentionMask& mask = args_.mask;
    if (!mask.data) return nullptr;
    const int64_t offset = item_.sequence * mask.sequence_stride + places_[row].head * mask.head_stride +
                           places_[row].token * mask.query_stride + key;
    return static_cast<const char*>(mask.data) + offset * static_cast<int64_t>(size_of(mask.dtype));
  }

  const AttentionArgs& args_;
  const AttentionItem& item_;
  const Workspace<T> work_;
  Products<T> products_;
  RowPlace places_[kQueryRows];
  KeyRange seen_[kQueryRows];
  float scales_[kQueryRows];
  int64_t seen_end_ = 0;
};

template <class T, class Stored = T>
void run_item_as(const AttentionArgs& args, const AttentionItem& item) {
  const Workspace<T> work(args.layout);
  ItemRun<T, Stored> run(args, item, work);
  if (item.partials) {
    const int64_t slot = partial_floats(item.rows, args.layout);
    run.run(
        [&](int64_t block) {
          float* at = item.partials + block * slot;
          return Partial{at, at + item.rows, at + 2 * item.rows};
        },
        [](const Partial&) {});
    return;
  }
  Accumulator result(work.output, item.rows, work.value_width);
  alignas(64) float maximum[kQueryRows], sum[kQueryRows];
  clear_partial(maximum, sum);
  run.run([&](int64_t) { return Partial{maximum, sum, work.block_output}; },
          [&](const Partial& partial) { result.merge(partial, item.rows, work.value_width); });
  store_output(args, item, result, work.value_width);
}

// Runs items of one head together: a block of keys and values is read from memory once for all of them.
template <class T, class Stored = T>
void run_items_as(const AttentionArgs& args, const AttentionItem* items, int count) {
  struct Running {
    ItemRun<T, Stored> run;
    Accumulator result;
    Running(const AttentionArgs& args, const AttentionItem& item, const Workspace<T>& work)
        : run(args, item, work), result(work.output, item.rows, work.value_width) {}
  };
  std::optional<Running> running[kItemsAtOnce];
  void* memory = thread_scratch(Workspace<T>::bytes(args.layout, count));
  int32_t begin = items[0].block_begin, end = items[0].block_end;
  for (int i = 0; i < count; ++i) {
    running[i].emplace(args, items[i], Workspace<T>(args.layout, memory, i));
    if (items[i].block_begin < begin) begin = items[i].block_begin;
    if (items[i].block_end > end) end = items[i].block_end;
  }
  alignas(64) float maximum[kQueryRows], sum[kQueryRows];
  const Workspace<T> work(args.layout, memory, 0);  // for what they share
  const Partial partial = {maximum, sum, work.block_output};
  for (int32_t block = begin; block < end; ++block)
    for (int i = 0; i < count; ++i) {
      if (block < items[i].block_begin || block >= items[i].block_end) continue;
      running[i]->run.run_block(block, partial);
      running[i]->result.merge(partial, items[i].rows, work.value_width);
    }
  for (int i = 0; i < count; ++i) store_output(args, items[i], running[i]->result, work.value_width);
}

void merge_item(const AttentionArgs& args, const AttentionItem& item) {
  Workspace<float> work(args.layout);
  Accumulator result(work.output, item.rows, work.value_width);
  alignas(64) float maximum[kQueryRows], sum[kQueryRows];
  clear_partial(maximum, sum);
  const int64_t slot = partial_floats(item.rows, args.layout);
  for (int64_t block = item.block_begin; block < item.block_end; ++block) {
    float* at = item.partials + block * slot;
    __builtin_memcpy(maximum, at, item.rows * sizeof(float));
    __builtin_memcpy(sum, at + item.rows, item.rows * sizeof(float));
    result.merge({maximum, sum, at + 2 * item.rows}, item.rows, work.value_width);
  }
  store_output(args, item, result, work.value_width);
}

template <class T, class Stored = T>
void run_some(const AttentionArgs& args, const AttentionItem* items, int count) {
  count == 1 ? run_item_as<T, Stored>(args, *items) : run_items_as<T, Stored>(args, items, count);
}

void run_items(const AttentionArgs& args, const AttentionItem* items, int count) {
  if (args.layout.format != KvFormat::same) return run_some<bf16, KvByte>(args, items, count);
  args.kv_dtype == DType::f32 ? run_some<float>(args, items, count) : run_some<bf16>(args, items, count);
}

}  // namespace
}  // namespace tilewright
