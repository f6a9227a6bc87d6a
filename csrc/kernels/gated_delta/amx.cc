// Vec before the headers written in terms of it.
#include "base/vec/avx512.h"

#include "base/kv_tiles.h"
#include "base/x86/amx.h"
#include "kernels/gated_delta/chunk.h"
#include "kernels/level.h"

namespace tilewright {
namespace {

// Rounds two Vecs to bf16 and interleaves them as a tile row. Halves are rounded away from zero. With additions and a
// shift this takes two thirds of the time of the conversion to bf16, which occupies its port for two cycles, and a
// permutation.
inline __m512i interleave(Vec even, Vec odd) {
  const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even.v), half), 16);
  return _mm512_ternarylogic_epi32(low, _mm512_add_epi32(_mm512_castps_si512(odd.v), half), high, 0xf8);  // a | b & c
}

inline Vec low_halves(__m512i pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; }
inline Vec high_halves(__m512i pairs) {
  return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

// The products of a chunk on tiles. A value that is not bf16 is the sum of two bf16, 16 bits of mantissa, or for fp32
// inputs of three, all 24 bits.
template <class T>
struct TileMatrix {
  using Element = bf16;
  static constexpr bool kWide = !kIsBf16<T>;
  static constexpr int kParts = kWide ? 3 : 2, kInputParts = kWide ? 3 : 1;

  static void store_left(bf16* row, int64_t part_stride, Vec v) {
#pragma GCC unroll 3
    for (int part = 0; part < kParts; ++part) {
      const __m256i bits = v.to_bf16_bits();
      _mm256_store_si256(reinterpret_cast<__m256i*>(row + part * part_stride), bits);
      if (part + 1 < kParts) v = v - Vec::widen(bits);
    }
  }
  static void store_right(bf16* pair_row, int64_t part_stride, int, Vec even, Vec odd) {
#pragma GCC unroll 3
    for (int part = 0; part < kParts; ++part) {
      const __m512i pairs = interleave(even, odd);
      _mm512_store_si512(pair_row + part * part_stride, pairs);
      if (part + 1 == kParts) break;
      even = even - low_halves(pairs);
      odd = odd - high_halves(pairs);
    }
  }

  // Copies a row, padded with zeros, and returns the sum of its squares.
  static float copy_row(const bf16* row, int64_t width, int64_t padded, bf16* copy, int64_t) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < padded; i += 32) {
      const __mmask32 mask = _bzhi_u32(~0u, width - i >= 32 ? 32 : static_cast<unsigned>(width - i));
      const __m512i pairs = _mm512_maskz_loadu_epi16(mask, row + i);
      _mm512_store_si512(copy + i, pairs);
      squares = _mm512_dpbf16_ps(squares, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(pairs));
    }
    return _mm512_reduce_add_ps(squares);
  }
  static float copy_row(const float* row, int64_t width, int64_t padded, bf16* copy, int64_t part_stride) {
    Vec squares = Vec::zero();
    for (int64_t i = 0; i < padded; i += Vec::kLanes) {
      const Vec v = Vec::load(row + i, width - i);
      store_left(copy + i, part_stride, v);
      squares = fma(v, v, squares);
    }
    return reduce_add(squares);
  }

  // Writes rows [tokens, depth] as right-hand tiles of their transpose, and the transpose [depth, kChunkTokens] itself.
  static void transpose(const bf16* rows, int64_t tokens, int64_t depth, bf16* tiles, bf16* columns) {
    for (int64_t token = 0; token < tokens; token += kTileColumns)
      pack_key_tiles<Vec>(rows + token * depth, depth, depth, tiles + token * depth);
    const int64_t tile_column = depth * kTileColumns;
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(2 * i);
    const __m512i evens = _mm512_load_si512(order), odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
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

  // c [32, 32] = A B in 2 x 2 tiles of sums, each operand loaded as few times as eight tiles allow. Products of parts
  // beyond the last part kept are skipped.
  template <int kLeftParts, int kRightParts>
  [[gnu::noinline]] void multiply(const bf16* a, int64_t stride, int64_t part_stride, const Right<bf16>& b,
                                  int64_t depth_tiles, float* c, Fetches& fetches) {
    constexpr int kKept = kLeftParts > kRightParts ? kLeftParts : kRightParts;
    const Right<bf16> right = b;
    TW_TILE_ZERO(0);
    TW_TILE_ZERO(1);
    TW_TILE_ZERO(2);
    TW_TILE_ZERO(3);
    for (int64_t d = 0; d < depth_tiles; ++d) {
      const bf16 *left = a + d * kTileDepth, *first = right.tile(d, 0), *second = right.tile(d, 1);
      for (int i = 0; i < kLeftParts; ++i) {
        TW_TILE_LOAD(4, left + i * part_stride, stride * 2);
        TW_TILE_LOAD(5, left + i * part_stride + 16 * stride, stride * 2);
        for (int j = 0; j < kRightParts && i + j < kKept; ++j) {
          TW_TILE_LOAD(6, first + j * right.part_stride, 64);
          TW_TILE_DOT(0, 4, 6);
          TW_TILE_DOT(2, 5, 6);
          TW_TILE_LOAD(7, second + j * right.part_stride, 64);
          TW_TILE_DOT(1, 4, 7);
          TW_TILE_DOT(3, 5, 7);
        }
        fetches.some(6);
      }
    }
    TW_TILE_STORE(0, c, kStripColumns * 4);
    TW_TILE_STORE(1, c + 16, kStripColumns * 4);
    TW_TILE_STORE(2, c + 16 * kStripColumns, kStripColumns * 4);
    TW_TILE_STORE(3, c + 16 * kStripColumns + 16, kStripColumns * 4);
  }

  TileScope tiles{32};
};

void chunk_on_tiles(const GatedDeltaArgs& args, const DeltaItem& item) {
  if (args.q.dtype == DType::bf16)
    Chunks<TileMatrix<bf16>, bf16>(args, item).run();
  else
    Chunks<TileMatrix<float>, float>(args, item).run();
}

}  // namespace

TILEWRIGHT_KERNELS(gated_delta, GatedDeltaKernels) = {kTileProduct.text, step, chunk_on_tiles};

}  // namespace tilewright
