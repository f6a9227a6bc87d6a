// AMX tiles: the instructions, the per-thread configuration, and C += A B on tiles.
//
// The instructions are asm with a memory clobber instead of the compiler's intrinsics: gcc 12 assumes that a tile load
// reads nothing and drops the stores before it (and those to the configuration before ldtilecfg).
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/bf16.h"
#include "base/product_name.h"
#include "base/tile.h"

namespace tilewright {
namespace {

#ifndef TILEWRIGHT_SIMULATED_TILES  // base/x86/simulated.h has them otherwise
#define TW_BYTES(stride) "r"(static_cast<int64_t>(stride))
#define TW_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t::)
#define TW_TILE_LOAD(t, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(p), TW_BYTES(stride) : "memory")
#define TW_TILE_STORE(t, p, stride) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), TW_BYTES(stride) : "memory")
#define TW_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#define TW_TILE_DOT_BYTES(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#define TW_TILE_SAVE(config) __asm__ volatile("sttilecfg %0" : "=m"(config))
#define TW_TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define TW_TILE_RELEASE() __asm__ volatile("tilerelease")
#endif
// Products of pairs of bf16 summed in fp32, or of quads of signed bytes in 32-bit integers.
#define TW_TILE_DOT_OF(Element, c, a, b)         \
  do {                                           \
    if constexpr (std::is_same_v<Element, bf16>) \
      TW_TILE_DOT(c, a, b);                      \
    else                                         \
      TW_TILE_DOT_BYTES(c, a, b);                \
  } while (false)

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// Configures this thread's tiles within a scope, and restores the previous configuration. torch's oneDNN remembers per
// thread which one it loaded and skips loading it again: without the restore torch's next GEMM would break. Tiles 0-3
// are C (row tile, column tile), 4-5 A, 6-7 B. The first row tile has min(rows, 16) rows, the second the rest.
class TileScope {
 public:
  explicit TileScope(int rows) {
    TW_TILE_SAVE(saved_);
    set_rows(rows);
  }
  ~TileScope() {
    if (saved_.palette)
      TW_TILE_CONFIGURE(saved_);
    else
      TW_TILE_RELEASE();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  // Changing the number of rows clears the tiles.
  void set_rows(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const uint8_t first = static_cast<uint8_t>(rows < 16 ? rows : 16);
    const uint8_t second = static_cast<uint8_t>(rows > 16 ? rows - 16 : 16);
    TileConfig config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes_per_row[tile] = 64;
      config.rows[tile] = tile == 0 || tile == 1 || tile == 4   ? first
                          : tile == 2 || tile == 3 || tile == 5 ? second
                                                                : 16;
    }
    TW_TILE_CONFIGURE(config);
  }

 private:
  TileConfig saved_;
  int rows_ = 0;
};

// The left operand of a tile product: up to 32 rows by 64 bytes * depth_tiles, in either of two layouts. Another layout
// is another struct with the same members except `data` and `depth_stride`.
template <class T>
struct LeftTilesOf {
  using Element = T;
  const T* data;
  int64_t row_stride;       // elements from row to row within a tile
  int64_t depth_stride;     // elements from one depth tile to the next
  int64_t row_tile_stride;  // elements from rows 0-15 to rows 16-31
  bool prefetch;            // whether its tiles come from beyond L1

  const T* at(int depth_tile) const { return data + depth_tile * depth_stride; }
  static LeftTilesOf row_major(const T* data, int64_t stride, bool prefetch = false) {
    return {data, stride, static_cast<int64_t>(64 / sizeof(T)), 16 * stride, prefetch};
  }
};
using LeftTiles = LeftTilesOf<bf16>;

inline constexpr ProductName kTileProduct = {"bf16_bf16_fp32", 32, 32, kTileDepth};

// Prefetches a tile's 16 lines into L1 (kLocality 3) or L2 (2). Never faults.
template <int kLocality = 3, class T>
inline void prefetch_tile(const T* tile, int64_t row_stride = 64 / sizeof(T)) {
  for (int row = 0; row < 16; ++row) __builtin_prefetch(tile + row * row_stride, 0, kLocality);
}

// c[rows, 16 * kColumns] = A B, or += when kAccumulate, for one or two column tiles; tile_at(depth, column) gives B's
// tiles. 2 x 2 accumulators: each loaded tile is used twice, and 4 + 2 + 2 are all the tiles there are. A tile load is
// 16 cache lines, more than the core prefetches itself: operands from L2 without prefetching cost 40 % of the speed
// when a neighbour shares the core. fetch(depth, column) prefetches the tile needed two steps later.
template <int kColumns, bool kAccumulate = false, class Left, class TileAt, class Fetch, class Sum>
inline void multiply_columns(const Left& a, int rows, int depth_tiles, TileAt tile_at, Fetch fetch, Sum* c,
                             int64_t ldc) {
  using Element = std::remove_cv_t<std::remove_pointer_t<decltype(a.at(0))>>;
  static_assert(std::is_same_v<Sum, std::conditional_t<std::is_same_v<Element, bf16>, float, int32_t>>);
  const int64_t a_bytes = a.row_stride * static_cast<int64_t>(sizeof(Element));
  if constexpr (kAccumulate) {
    TW_TILE_LOAD(0, c, ldc * 4);
    if constexpr (kColumns == 2) TW_TILE_LOAD(1, c + 16, ldc * 4);
  } else {
    TW_TILE_ZERO(0);
    if constexpr (kColumns == 2) TW_TILE_ZERO(1);
  }
  if (rows > 16) {
    if constexpr (kAccumulate) {
      TW_TILE_LOAD(2, c + 16 * ldc, ldc * 4);
      if constexpr (kColumns == 2) TW_TILE_LOAD(3, c + 16 * ldc + 16, ldc * 4);
    } else {
      TW_TILE_ZERO(2);
      if constexpr (kColumns == 2) TW_TILE_ZERO(3);
    }
    for (int d = 0; d < depth_tiles; ++d) {
      const Element* a0 = a.at(d);
      TW_TILE_LOAD(6, tile_at(d, 0), 64);
      TW_TILE_LOAD(4, a0, a_bytes);
      if (a.prefetch) prefetch_tile(a.at(d + 2), a.row_stride);
      TW_TILE_DOT_OF(Element, 0, 4, 6);
      TW_TILE_LOAD(5, a0 + a.row_tile_stride, a_bytes);
      if (a.prefetch) prefetch_tile(a.at(d + 2) + a.row_tile_stride, a.row_stride);
      TW_TILE_DOT_OF(Element, 2, 5, 6);
      fetch(d, 0);
      if constexpr (kColumns == 2) {
        TW_TILE_LOAD(7, tile_at(d, 1), 64);
        TW_TILE_DOT_OF(Element, 1, 4, 7);
        fetch(d, 1);
        TW_TILE_DOT_OF(Element, 3, 5, 7);
      }
    }
    TW_TILE_STORE(2, c + 16 * ldc, ldc * 4);
    if constexpr (kColumns == 2) TW_TILE_STORE(3, c + 16 * ldc + 16, ldc * 4);
  } else {
    for (int d = 0; d < depth_tiles; ++d) {
      TW_TILE_LOAD(4, a.at(d), a_bytes);
      TW_TILE_LOAD(6, tile_at(d, 0), 64);
      fetch(d, 0);
      TW_TILE_DOT_OF(Element, 0, 4, 6);
      if constexpr (kColumns == 2) {
        TW_TILE_LOAD(7, tile_at(d, 1), 64);
        fetch(d, 1);
        TW_TILE_DOT_OF(Element, 1, 4, 7);
      }
    }
  }
  TW_TILE_STORE(0, c, ldc * 4);
  if constexpr (kColumns == 2) TW_TILE_STORE(1, c + 16, ldc * 4);
}

}  // namespace
}  // namespace tilewright
