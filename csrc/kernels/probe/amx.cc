#include "base/vec/avx512.h"

#include "base/x86/amx.h"
#include "kernels/level.h"
#include "kernels/probe/generic.h"

namespace tilewright {
namespace {

// Tiles 0-3 accumulate the four products of operands 4, 5 (left) and 6, 7 (right): four chains of 16 cycles hide the
// latency of 52, as in a GEMM's inner loop.
#define TILEWRIGHT_MULTIPLY_TILES(instruction)                                                     \
  asm volatile("1:\n\t" instruction " %%tmm6, %%tmm4, %%tmm0\n\t" instruction                      \
               " %%tmm7, %%tmm4, %%tmm1\n\t" instruction " %%tmm6, %%tmm5, %%tmm2\n\t" instruction \
               " %%tmm7, %%tmm5, %%tmm3\n\t"                                                       \
               "dec %0\n\t"                                                                        \
               "jnz 1b"                                                                            \
               : "+r"(rounds)                                                                      \
               :                                                                                   \
               : "memory", "cc")

void load_operands(const void* operand) {
  TW_TILE_ZERO(0);
  TW_TILE_ZERO(1);
  TW_TILE_ZERO(2);
  TW_TILE_ZERO(3);
  TW_TILE_LOAD(4, operand, 64);
  TW_TILE_LOAD(5, operand, 64);
  TW_TILE_LOAD(6, operand, 64);
  TW_TILE_LOAD(7, operand, 64);
}

int64_t multiply_bf16_tiles(int64_t rounds, float* sink) {
  alignas(64) bf16 operand[512];
  for (int i = 0; i < 512; ++i) operand[i] = to_bf16(static_cast<float>(i % 7 - 3) * 0.25f);
  alignas(64) float result[256];
  const int64_t operations = rounds * 4 * (16 * 16 * 32) * 2;
  {
    TileScope tiles(32);
    load_operands(operand);
    if (rounds > 0) TILEWRIGHT_MULTIPLY_TILES("tdpbf16ps");
    TW_TILE_STORE(0, result, 64);
  }
  *sink = result[0];
  return operations;
}

int64_t multiply_int8_tiles(int64_t rounds, float* sink) {
  alignas(64) int8_t operand[1024];
  for (int i = 0; i < 1024; ++i) operand[i] = static_cast<int8_t>(i % 7 - 3);
  alignas(64) int32_t result[256];
  const int64_t operations = rounds * 4 * (16 * 16 * 64) * 2;
  {
    TileScope tiles(32);
    load_operands(operand);
    if (rounds > 0) TILEWRIGHT_MULTIPLY_TILES("tdpbssd");
    TW_TILE_STORE(0, result, 64);
  }
  *sink = static_cast<float>(result[0]);
  return operations;
}

}  // namespace

TILEWRIGHT_KERNELS(probe, ProbeKernels) = {sum_values, multiply_fp32, multiply_bf16_tiles, multiply_int8_tiles};
}  // namespace tilewright
