// Attention of an item in terms of Vec and of tile products. Include after a Vec and after `Products`:
//
//   template <class T> struct Products {        T: type of keys and values
//     using Left = ...;                         type of the left operand: queries, then softmax weights
//     explicit Products(int rows);              whatever the products need for blocks of `rows` rows
//     template <class TileAt>
//     void multiply(const Left* a, int64_t lda, int rows, TileAt, int column_tiles, int depth_tiles, float* c, int64_t
//     ldc);
//   };
#pragma once

#include "base/scratch.h"
#include "kernels/attention/softmax.h"

namespace tilewright {
namespace {

// One item's working memory, carved out of the thread's scratch.
template <class T>
struct Workspace {
  using Left = typename Products<T>::Left;
  int64_t key_depth, value_width;  // padded head widths
  Left* queries;                   // [kQueryRows, key_depth]
  float* scores;                   // [kQueryRows, kKeyBlock]; the softmax weights take their place row by row
  float* block_output;             // [kQueryRows, value_width]
  float* output;                   // [kQueryRows, value_width]
  T* last_values;                  // one row of value tiles, for the tokens that do not fill a tile

  explicit Workspace(const KvLayout& layout)
      : key_depth(layout.key_depth_tiles() * kTileDepth), value_width(layout.value_column_tiles() * kTileColumns) {
    char* p = static_cast<char*>(
        thread_scratch(kQueryRows * (key_depth * 4 + kKeyBlock * 4 + value_width * 8) + kTileDepth * value_width * 4));
    auto take = [&](int64_t bytes) { return p += bytes, p - bytes; };
    queries = reinterpret_cast<Left*>(take(kQueryRows * key_depth * 4));
    scores = reinterpret_cast<float*>(take(kQueryRows * kKeyBlock * 4));
    block_output = reinterpret_cast<float*>(take(kQueryRows * value_width * 4));
    output = reinterpret_cast<float*>(take(kQueryRows * value_width * 4));
    last_values = reinterpret_cast<T*>(take(kTileDepth * value_width * 4));
  }

  // [kQueryRows, kKeyBlock] of Left at the stride of the scores.
  static constexpr int64_t kWeightStride = kKeyBlock * sizeof(float) / sizeof(Left);
  Left* weights() const { return reinterpret_cast<Left*>(scores); }
};

// Where a row's query and output are.
struct RowPlace {
  int64_t token, head;  // token within its sequence
};

inline RowPlace place_of(const AttentionArgs& args, const AttentionItem& item, int row) {
  const int64_t group = args.group(), r = item.row_begin + row;
  return {r / group, item.head * group + r % group};
}

template <class TQ, class Left>
inline void load_queries(const AttentionArgs& args, const AttentionItem& item, Left* queries, int64_t depth) {
  const int64_t first = args.query_starts[item.sequence];
  const int64_t width = args.layout.head_width;
  // The softmax takes the maximum of raw products, so a negative scale changes the sign here.
  const Vec sign = Vec::set1(args.scale < 0 ? -1.0f : 1.0f);
  for (int row = 0; row < item.rows; ++row, queries += depth) {
    const RowPlace place = place_of(args, item, row);
    const TQ* q =
        static_cast<const TQ*>(args.q) + (first + place.token) * args.q_token_stride + place.head * args.q_head_stride;
    for (int64_t i = 0; i < depth; i += Vec::kLanes)
      (Vec::load(q + i, width - i < 0 ? 0 : width - i) * sign).store(queries + i);
  }
}

template <class TQ>
inline void store_output(const AttentionArgs& args, const AttentionItem& item, const Accumulator& result,
                         int64_t value_width) {
  const int64_t first = args.query_starts[item.sequence];
  const int64_t width = args.layout.head_width;
  for (int row = 0; row < item.rows; ++row) {
    const RowPlace place = place_of(args, item, row);
    TQ* out =
        static_cast<TQ*>(args.out) + (first + place.token) * args.out_token_stride + place.head * args.out_head_stride;
    // A row that sees no key gives zeros.
    const Vec scale = Vec::set1(result.sum[row] == 0.0f ? 0.0f : 1.0f / result.sum[row]);
    const float* from = result.output + row * value_width;
    int64_t i = 0;
    for (; i + Vec::kLanes <= width; i += Vec::kLanes) (Vec::load(from + i) * scale).store(out + i);
    if (i < width) (Vec::load(from + i) * scale).store(out + i, width - i);
  }
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

// The tiles of a block of keys, found through the block table once per block.
template <class T>
struct BlockTiles {
  const T* keys[kKeyBlock / kTileColumns];
  const T* values[kKeyBlock / kTileDepth];
  int keys_present;  // tokens of the block that exist
  int num_columns;   // those, up to whole value tiles

  BlockTiles(const AttentionArgs& args, const AttentionItem& item, int64_t block, T* last_values) {
    const KvLayout& layout = args.layout;
    const int64_t begin = block * kKeyBlock;
    const int64_t left = args.kv_lengths[item.sequence] - begin;
    keys_present = static_cast<int>(left < kKeyBlock ? left : kKeyBlock);
    num_columns = static_cast<int>(round_up(keys_present, kTileDepth));
    const int32_t* table = args.block_table + item.sequence * args.block_table_stride;
    const int64_t head_offset = item.head * layout.head_elements();
    for (int i = 0; i < num_columns; i += kTileDepth) {
      const int64_t token = begin + i;
      const T* page =
          static_cast<const T*>(args.pages) + table[token / layout.page_size] * layout.page_elements() + head_offset;
      const int64_t in_page = token % layout.page_size;
      keys[i / kTileColumns] = page + layout.key_tile(in_page);
      keys[i / kTileColumns + 1] = page + layout.key_tile(in_page + kTileColumns);
      values[i / kTileDepth] = page + layout.value_tile(in_page);
    }
    if (keys_present % kTileDepth) clear_missing(layout, last_values);
  }

  // Values of tokens that do not exist yet may be anything, NaN too, and 0 * NaN is NaN: the last, partly filled row of
  // value tiles is used from a copy with zeros in their place.
  void clear_missing(const KvLayout& layout, T* copy) {
    const int last = num_columns / kTileDepth - 1;
    const int present = keys_present % kTileDepth;
    const int64_t elements = layout.value_column_tiles() * kTileElements;
    __builtin_memcpy(copy, values[last], elements * sizeof(T));
    for (int64_t tile = 0; tile < elements; tile += kTileElements)
      for (int depth = present; depth < kTileDepth; ++depth)
        for (int column = 0; column < kTileColumns; ++column) copy[tile + tile_offset<T>(depth, column)] = T{};
    values[last] = copy;
  }
};

// The mask of a row from key `key` on, or null.
inline const void* mask_at(const AttentionArgs& args, const AttentionItem& item, const RowPlace& place, int64_t key) {
  const AttentionMask& mask = args.mask;
  if (!mask.data) return nullptr;
  const int64_t offset =
      item.sequence * mask.sequence_stride + place.head * mask.head_stride + place.token * mask.query_stride + key;
  return static_cast<const char*>(mask.data) + offset * static_cast<int64_t>(size_of(mask.dtype));
}

// scores -> weights of one block, with the block's maxima and sums.
template <class T>
inline void softmax_block(const AttentionArgs& args, const AttentionItem& item, int64_t block,
                          const BlockTiles<T>& tiles, Workspace<T>& work, float* maximum, float* sum) {
  const int64_t begin = block * kKeyBlock;
  const float scale = (args.scale < 0 ? -args.scale : args.scale) * kLog2E;
  const bool plain = !args.mask.data && args.soft_cap <= 0;
  for (int row = 0; row < item.rows; ++row) {
    const RowPlace place = place_of(args, item, row);
    const KeyRange range = keys_seen(args, item.sequence, place.token);
    RowRules rules;
    rules.begin = static_cast<int>(range.begin <= begin ? 0 : range.begin - begin);
    rules.end = static_cast<int>(range.end - begin < tiles.keys_present ? range.end - begin : tiles.keys_present);
    float* scores = work.scores + row * kKeyBlock;
    auto* weights = work.weights() + row * Workspace<T>::kWeightStride;
    if (plain && rules.begin == 0 && rules.end == tiles.num_columns) {
      softmax_row(scores, tiles.num_columns, scale, weights, maximum + row, sum + row);
    } else {
      rules.scale = scale;
      rules.soft_cap = args.soft_cap * kLog2E;
      rules.mask = mask_at(args, item, place, begin);
      rules.mask_dtype = args.mask.dtype;
      softmax_row_with_rules(scores, tiles.num_columns, rules, weights, maximum + row, sum + row);
    }
  }
}

// The partial of one block: maxima, sums and the output before division.
template <class T>
inline void attend_block(const AttentionArgs& args, const AttentionItem& item, int64_t block, Products<T>& products,
                         Workspace<T>& work, float* maximum, float* sum, float* output) {
  const BlockTiles<T> tiles(args, item, block, work.last_values);
  products.multiply(
      work.queries, work.key_depth, item.rows, [&](int d, int j) { return tiles.keys[j] + d * kTileElements; },
      tiles.num_columns / kTileColumns, static_cast<int>(work.key_depth / kTileDepth), work.scores, kKeyBlock);
  softmax_block(args, item, block, tiles, work, maximum, sum);
  products.multiply(
      work.weights(), Workspace<T>::kWeightStride, item.rows,
      [&](int d, int j) { return tiles.values[d] + j * kTileElements; },
      static_cast<int>(work.value_width / kTileColumns), tiles.num_columns / kTileDepth, output, work.value_width);
}

template <class TQ, class T>
void run_item_as(const AttentionArgs& args, const AttentionItem& item) {
  Workspace<T> work(args.layout);
  Products<T> products(item.rows);
  load_queries<TQ>(args, item, work.queries, work.key_depth);
  if (item.partials) {
    float* slot = item.partials + item.block_begin * partial_floats(item.rows, args.layout);
    for (int64_t block = item.block_begin; block < item.block_end; ++block) {
      attend_block(args, item, block, products, work, slot, slot + item.rows, slot + 2 * item.rows);
      slot += partial_floats(item.rows, args.layout);
    }
    return;
  }
  Accumulator result;
  result.output = work.output;
  result.clear(item.rows, work.value_width);
  alignas(64) float maximum[kQueryRows], sum[kQueryRows];
  for (int r = 0; r < kQueryRows; ++r) maximum[r] = kMinusInfinity, sum[r] = 0;
  for (int64_t block = item.block_begin; block < item.block_end; ++block) {
    attend_block(args, item, block, products, work, maximum, sum, work.block_output);
    result.merge(maximum, sum, work.block_output, item.rows, work.value_width);
  }
  store_output<TQ>(args, item, result, work.value_width);
}

template <class TQ>
void merge_item_as(const AttentionArgs& args, const AttentionItem& item) {
  Workspace<float> work(args.layout);
  Accumulator result;
  result.output = work.output;
  result.clear(item.rows, work.value_width);
  alignas(64) float maximum[kQueryRows], sum[kQueryRows];
  for (int r = 0; r < kQueryRows; ++r) maximum[r] = kMinusInfinity, sum[r] = 0;
  const float* slot = item.partials + item.block_begin * partial_floats(item.rows, args.layout);
  for (int64_t block = item.block_begin; block < item.block_end; ++block) {
    __builtin_memcpy(maximum, slot, item.rows * sizeof(float));
    __builtin_memcpy(sum, slot + item.rows, item.rows * sizeof(float));
    result.merge(maximum, sum, slot + 2 * item.rows, item.rows, work.value_width);
    slot += partial_floats(item.rows, args.layout);
  }
  store_output<TQ>(args, item, result, work.value_width);
}

void run_item(const AttentionArgs& args, const AttentionItem& item) {
  const bool wide_kv = args.kv_dtype == DType::f32;
  if (args.dtype == DType::f32)
    wide_kv ? run_item_as<float, float>(args, item) : run_item_as<float, bf16>(args, item);
  else
    wide_kv ? run_item_as<bf16, float>(args, item) : run_item_as<bf16, bf16>(args, item);
}

void merge_item(const AttentionArgs& args, const AttentionItem& item) {
  args.dtype == DType::f32 ? merge_item_as<float>(args, item) : merge_item_as<bf16>(args, item);
}

// Two elements that lie side by side in a bf16 tile row, or in the two halves of an fp32 one.
inline void put_pairs(bf16* row, const bf16* even, const bf16* odd, int columns) {
  // One 32-bit store per column: a loop the compiler turns into vectors.
  for (int c = 0; c < columns; ++c) {
    const uint32_t pair = even[c].bits | static_cast<uint32_t>(odd[c].bits) << 16;
    __builtin_memcpy(row + 2 * c, &pair, 4);
  }
}

inline void put_pairs(float* row, const float* even, const float* odd, int columns) {
  for (int c = 0; c < columns; ++c) row[c] = even[c], row[kTileColumns + c] = odd[c];
}

// 32 tokens of a head as two columns of key tiles: tile row r holds dims 2r, 2r+1 of 16 tokens.
template <class T>
void pack_keys_as(const VarlenArgs& args, int64_t token, int64_t count, int64_t head, T* tiles) {
  const KvLayout& layout = args.attention.layout;
  const int64_t width = layout.head_width, depth_tiles = layout.key_depth_tiles();
  if (count < kTileDepth || width % kTileDepth) __builtin_memset(tiles, 0, 2 * depth_tiles * kTileElements * sizeof(T));
  const T* k = static_cast<const T*>(args.k) + token * args.k_token_stride + head * args.k_head_stride;
  for (int64_t column = 0; column < count; ++column, k += args.k_token_stride) {
    T* tile = tiles + column / kTileColumns * depth_tiles * kTileElements;
    T* at = tile + tile_offset<T>(0, static_cast<int>(column % kTileColumns));
    // Pairs of one token are a tile row of 32 elements apart, through all its depth tiles.
    int64_t d = 0;
    for (; d + 2 <= width; d += 2, at += 32) at[0] = k[d], at[tile_offset<T>(1, 0)] = k[d + 1];
    if (d < width) at[0] = k[d];
  }
}

// 32 tokens of a head as a row of value tiles: tile row r holds tokens 2r, 2r+1, interleaved by dim.
template <class T>
void pack_values_as(const VarlenArgs& args, int64_t token, int64_t count, int64_t head, T* tiles) {
  const KvLayout& layout = args.attention.layout;
  const int64_t width = layout.head_width;
  if (count < kTileDepth) __builtin_memset(tiles, 0, layout.value_column_tiles() * kTileElements * sizeof(T));
  const T* v = static_cast<const T*>(args.v) + token * args.v_token_stride + head * args.v_head_stride;
  static constexpr T kZeros[kTileColumns] = {};
  for (int64_t depth = 0; depth < count; depth += 2, v += 2 * args.v_token_stride) {
    T* row = tiles + depth / 2 * 32;
    const bool last = depth + 1 == count;
    for (int64_t d = 0; d < width; d += kTileColumns, row += kTileElements) {
      const T* odd = last ? kZeros : v + args.v_token_stride + d;
      if (d + kTileColumns <= width)
        put_pairs(row, v + d, odd, kTileColumns);
      else
        put_pairs(row, v + d, odd, static_cast<int>(width - d));
    }
  }
}

void pack_keys(const VarlenArgs& args, int64_t token, int64_t count, int64_t head, void* tiles) {
  if (args.attention.kv_dtype == DType::f32)
    pack_keys_as(args, token, count, head, static_cast<float*>(tiles));
  else
    pack_keys_as(args, token, count, head, static_cast<bf16*>(tiles));
}

void pack_values(const VarlenArgs& args, int64_t token, int64_t count, int64_t head, void* tiles) {
  if (args.attention.kv_dtype == DType::f32)
    pack_values_as(args, token, count, head, static_cast<float*>(tiles));
  else
    pack_values_as(args, token, count, head, static_cast<bf16*>(tiles));
}

}  // namespace
}  // namespace tilewright
