// Gathers and scatters of a range of rows in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include <cstring>

#include "base/tile.h"
#include "base/vec/row.h"
#include "kernels/embedding/embedding.h"
#include "kernels/linear/packed_value.h"

namespace tilewright {
namespace {

inline int64_t id_at(const EmbeddingArgs& args, int64_t i) {
  if (args.id_dtype == DType::i64) return static_cast<const int64_t*>(args.ids)[i];
  return static_cast<const int32_t*>(args.ids)[i];
}

// Returns the table's row of a token, or -1 if another rank has it.
inline int64_t row_of(const EmbeddingArgs& args, int64_t i) {
  const int64_t row = id_at(args, i) - args.first;
  return row >= 0 && row < args.num_rows ? row : -1;
}

inline void clear_row(const Rows& rows, int64_t row, int64_t width) {
  std::memset(rows.from(row).data, 0, width * static_cast<int64_t>(size_of(rows.dtype)));
}

inline void copy_row(const Rows& to, int64_t to_row, const Rows& from, int64_t from_row, int64_t width) {
  std::memcpy(to.from(to_row).data, from.from(from_row).data, width * static_cast<int64_t>(size_of(to.dtype)));
}

void gather_rows(const EmbeddingArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = row_of(args, i);
    row < 0 ? clear_row(args.out, i, args.width) : copy_row(args.out, i, args.table, row, args.width);
  }
}

// Gathers one column of the packed table: a pair of depths every 32 elements, so a token reads one line in sixteen of a
// tile.
template <class T>
void gather_packed_row(const T* table, T* out, int64_t id, int64_t width) {
  const int64_t num_depth_tiles = ceil_div(width, kTileDepth);
  const T* column = table + packed_offset<T>(id, 0, num_depth_tiles);
  constexpr int kSecond = tile_offset<T>(1, 0);  // from the even to the odd depth of a pair
  constexpr int kNextPair = tile_offset<T>(2, 0);
  constexpr int kNextTile = 2 * kTileElements;
  for (int64_t k = 0; k < width; k += kTileDepth, column += kNextTile) {
    const int64_t depth = width - k < kTileDepth ? width - k : kTileDepth;
    for (int64_t d = 0; d + 1 < depth; d += 2) {
      const T* pair = column + d / 2 * kNextPair;
      out[k + d] = pair[0];
      out[k + d + 1] = pair[kSecond];
    }
    if (depth % 2) out[k + depth - 1] = column[depth / 2 * kNextPair];
  }
}

void gather_packed_rows(const EmbeddingArgs& args, int64_t begin, int64_t end) {
  const auto gather = [&](auto t) {
    using T = decltype(t);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = row_of(args, i);
      if (row < 0)
        clear_row(args.out, i, args.width);
      else if (!is_plain(args.packed))
        unpack_column(args.packed, row / kStripColumns, static_cast<int>(row % kStripColumns), args.out.row<T>(i));
      else
        gather_packed_row(static_cast<const T*>(args.packed.data), args.out.row<T>(i), row, args.width);
    }
  };
  args.out.dtype == DType::f32 ? gather(float{}) : gather(bf16{});
}

void write_rows(const ScatterArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) copy_row(args.out, args.rows[i], args.values, i, args.width);
}

void add_rows(const ScatterArgs& args, int64_t begin, int64_t end) {
  const auto add = [&](auto t) {
    using T = decltype(t);
    for (int64_t row = begin; row < end; ++row) {
      const T* values = args.values.row<T>(row);
      T* out = args.out.row<T>(args.rows[row]);
      for_each_vec(args.width, [&](int64_t i, auto count) {
        store_some(load_some(out + i, count) + load_some(values + i, count), out + i, count);
      });
    }
  };
  args.out.dtype == DType::f32 ? add(float{}) : add(bf16{});
}

}  // namespace
}  // namespace tilewright
