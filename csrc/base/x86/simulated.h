// The bf16 and tile instructions of x86 in plain AVX-512, to test the levels that have them on machines without.
// Included before everything else in the kernels of those levels if TILEWRIGHT_SIMULATE is set. It does not simulate
// how sums are rounded or denormal numbers treated.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define TILEWRIGHT_SIMULATED_TILES
#define __AVX512BF16__ 1  // the kernels ask for it

namespace tilewright {
namespace {

inline __m512i simulated_round(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16);
}

inline __m256bh simulated_cvtneps(__m512 x) {
  return reinterpret_cast<__m256bh>(_mm512_cvtepi32_epi16(simulated_round(x)));
}

inline __m512 simulated_dpbf16(__m512 sum, __m512bh a, __m512bh b) {
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)), _mm512_castsi512_ps(_mm512_and_si512(y, high)),
                        sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)),
                         sum);
}

inline __m512i simulated_permute_bytes(uint64_t mask, __m512i index, __m512i from) {
  alignas(64) uint8_t at[64], table[64], out[64];
  _mm512_store_si512(at, index);
  _mm512_store_si512(table, from);
  for (int i = 0; i < 64; ++i) out[i] = mask >> i & 1 ? table[at[i] & 63] : 0;
  return _mm512_load_si512(out);
}

// The tiles of a thread: 16 rows of 64 bytes each, of which the configuration uses some.
struct SimulatedTiles {
  uint8_t config[64] = {};  // as ldtilecfg takes it: the palette, bytes per row from byte 16, rows from byte 48
  alignas(64) uint8_t data[8][16][64] = {};

  int rows(int tile) const { return config[48 + tile]; }
  int row_bytes(int tile) const { return config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }

  void configure(const void* wanted) {
    std::memcpy(config, wanted, sizeof config);
    std::memset(data, 0, sizeof data);
  }
  void release() {
    std::memset(config, 0, sizeof config);
    std::memset(data, 0, sizeof data);
  }
  void zero(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }
  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int r = 0; r < rows(tile); ++r)
      std::memcpy(data[tile][r], static_cast<const char*>(from) + r * stride, row_bytes(tile));
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int r = 0; r < rows(tile); ++r)
      std::memcpy(static_cast<char*>(to) + r * stride, data[tile][r], row_bytes(tile));
  }
  // c += a b by rows of b: b has groups of four bytes, one for each column of c.
  void dot_pairs(int c, int a, int b) {
    for (int m = 0; m < rows(c); ++m) {
      __m512 sum = _mm512_load_ps(data[c][m]);
      for (int k = 0; k < rows(b); ++k)
        sum = simulated_dpbf16(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(group(a, m, k))),
                               reinterpret_cast<__m512bh>(_mm512_load_si512(data[b][k])));
      _mm512_store_ps(data[c][m], sum);
    }
  }
  void dot_bytes(int c, int a, int b) {
    for (int m = 0; m < rows(c); ++m)
      for (int n = 0; n < 16; ++n) {
        int32_t sum;
        std::memcpy(&sum, data[c][m] + 4 * n, 4);
        for (int k = 0; k < rows(b); ++k)
          for (int i = 0; i < 4; ++i)
            sum += static_cast<int8_t>(data[a][m][4 * k + i]) * static_cast<int8_t>(data[b][k][4 * n + i]);
        std::memcpy(data[c][m] + 4 * n, &sum, 4);
      }
  }
  int group(int tile, int row, int k) const {
    int bits;
    std::memcpy(&bits, data[tile][row] + 4 * k, 4);
    return bits;
  }
};

// One for all kernels of a thread would need a shared symbol; each file has its own, as no two run at once.
inline thread_local SimulatedTiles simulated_tiles;

}  // namespace
}  // namespace tilewright

#define _mm512_cvtneps_pbh(x) ::tilewright::simulated_cvtneps(x)
#define _mm512_dpbf16_ps(sum, a, b) ::tilewright::simulated_dpbf16(sum, a, b)
#define _mm512_maskz_permutexvar_epi8(mask, index, from) ::tilewright::simulated_permute_bytes(mask, index, from)
#define TW_TILE_SAVE(saved) std::memcpy(&(saved), simulated_tiles.config, 64)
#define TW_TILE_CONFIGURE(wanted) simulated_tiles.configure(&(wanted))
#define TW_TILE_RELEASE() simulated_tiles.release()
#define TW_TILE_ZERO(t) simulated_tiles.zero(t)
#define TW_TILE_LOAD(t, p, stride) simulated_tiles.load(t, p, stride)
#define TW_TILE_STORE(t, p, stride) simulated_tiles.store(t, p, stride)
#define TW_TILE_DOT(c, a, b) simulated_tiles.dot_pairs(c, a, b)
#define TW_TILE_DOT_BYTES(c, a, b) simulated_tiles.dot_bytes(c, a, b)
