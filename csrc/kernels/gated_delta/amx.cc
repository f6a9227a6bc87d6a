// Vec before what is written in terms of it.
#include "base/vec/avx512.h"

#include "base/amx.h"
#include "base/kv_tiles.h"
#include "kernels/gated_delta/generic.h"

namespace tilewright {
namespace {

// Two Vecs, rounded to bf16 and interleaved: a tile row.
inline __m512i interleave(Vec even, Vec odd) {
  const __m512i order =
      _mm512_setr_epi32(0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007,
                        0x00180008, 0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v)));
}

inline Vec low_halves(__m512i pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; }
inline Vec high_halves(__m512i pairs) {
  return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

// The products of a chunk on tiles. A value that is not bf16 already is the sum of two that are.
struct TileMatrix {
  using Element = bf16;
  static constexpr int kParts = 2;

  static void store_left(bf16* row, int64_t part_stride, Vec v) {
    v.store(row);
    (v - Vec::load(row)).store(row + part_stride);
  }
  static void store_right(bf16* pair_row, int64_t part_stride, int, Vec even, Vec odd) {
    const __m512i high = interleave(even, odd);
    _mm512_store_si512(pair_row, high);
    _mm512_store_si512(pair_row + part_stride, interleave(even - low_halves(high), odd - high_halves(high)));
  }

  static float copy_row(const bf16* row, int64_t width, int64_t padded, bf16* copy) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < padded; i += 32) {
      const __mmask32 mask = width - i >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint64_t{1} << (width - i)) - 1);
      const __m512i pairs = _mm512_maskz_loadu_epi16(mask, row + i);
      _mm512_store_si512(copy + i, pairs);
      squares = _mm512_dpbf16_ps(squares, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(pairs));
    }
    return _mm512_reduce_add_ps(squares);
  }

  static void transpose(const bf16* rows, int64_t tokens, int64_t depth, bf16* tiles, bf16* columns) {
    const int64_t tile_column = depth * kTileColumns;
    for (int64_t token = 0; token < tokens; token += kTileColumns)
      pack_key_tiles(rows + token * depth, depth, depth, tiles + token * depth);
    __m512i evens;
    {
      alignas(64) uint16_t order[32];
      for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(2 * i);
      evens = _mm512_load_si512(order);
    }
    const __m512i odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
    for (int64_t token = 0; token < tokens; token += kStripColumns) {
      for (int64_t pair = 0; pair < depth / 2; ++pair) {
        const bf16* row = tiles + token * depth + pair * 32;
        const __m512i first = _mm512_load_si512(row), second = _mm512_load_si512(row + tile_column);
        bf16* column = columns + 2 * pair * kChunkTokens + token;
        _mm512_store_si512(column, _mm512_permutex2var_epi16(first, evens, second));
        _mm512_store_si512(column + kChunkTokens, _mm512_permutex2var_epi16(first, odds, second));
      }
    }
  }

  // 32 rows at a time in 2 x 2 tiles of sums, each operand loaded as few times as eight tiles allow. The rest of A
  // times the rest of B is below what is kept. A step is eight tile products, 128 cycles: eight pieces of some 16
  // instructions.
  template <bool kAccumulate, class Beside>
  void multiply(const bf16* a, int64_t stride, int64_t part_stride, int left_parts, int64_t rows, const Right<bf16>& b,
                int64_t depth_tiles, float* c, Beside& beside) {
    for (int64_t row = 0; row < rows; row += 32, a += 32 * stride, c += 32 * kStripColumns) {
      if constexpr (kAccumulate) {
        TW_TILE_LOAD(0, c, kStripColumns * 4);
        TW_TILE_LOAD(1, c + 16, kStripColumns * 4);
        TW_TILE_LOAD(2, c + 16 * kStripColumns, kStripColumns * 4);
        TW_TILE_LOAD(3, c + 16 * kStripColumns + 16, kStripColumns * 4);
      } else {
        TW_TILE_ZERO(0);
        TW_TILE_ZERO(1);
        TW_TILE_ZERO(2);
        TW_TILE_ZERO(3);
      }
      for (int64_t d = 0; d < depth_tiles; ++d) {
        const bf16 *left = a + d * kTileDepth, *first = b.tile(d, 0), *second = b.tile(d, 1);
        load_left(left, stride);
        if (b.part_stride) add_products(first + b.part_stride, second + b.part_stride);
        add_products(first, second);
        beside.some(8);
        if (left_parts == 1) continue;
        load_left(left + part_stride, stride);
        add_products();
      }
      TW_TILE_STORE(0, c, kStripColumns * 4);
      TW_TILE_STORE(1, c + 16, kStripColumns * 4);
      TW_TILE_STORE(2, c + 16 * kStripColumns, kStripColumns * 4);
      TW_TILE_STORE(3, c + 16 * kStripColumns + 16, kStripColumns * 4);
    }
  }

  static void load_left(const bf16* a, int64_t stride) {
    TW_TILE_LOAD(4, a, stride * 2);
    TW_TILE_LOAD(5, a + 16 * stride, stride * 2);
  }
  static void add_products() {
    TW_TILE_DOT(0, 4, 6);
    TW_TILE_DOT(2, 5, 6);
    TW_TILE_DOT(1, 4, 7);
    TW_TILE_DOT(3, 5, 7);
  }
  static void add_products(const bf16* first, const bf16* second) {
    TW_TILE_LOAD(6, first, 64);
    TW_TILE_LOAD(7, second, 64);
    add_products();
  }

  TileScope tiles{32};
};

void chunk_on_tiles(const GatedDeltaArgs& args, const DeltaItem& item) {
  if (args.dtype == DType::bf16)
    Chunks<TileMatrix, bf16>(args, item).run();
  else
    chunk(args, item);
}

}  // namespace

extern const GatedDeltaKernels gated_delta_amx;
const GatedDeltaKernels gated_delta_amx = {step, chunk_on_tiles};

}  // namespace tilewright
