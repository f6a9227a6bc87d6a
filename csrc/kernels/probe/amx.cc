// The tile instructions are written as assembly: gcc 12 drops the stores that fill a config before _tile_loadconfig,
// and GCC bug 122446 touches the other tile intrinsics.
#include "base/vec/avx512.h"

#include "kernels/probe/generic.h"

namespace tilewright {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Eight tiles of 16 rows of 64 bytes for the length of a scope; then the config the thread had before. Whoever loaded
// that one (torch's oneDNN, for one) may count on finding it.
class AllTiles {
 public:
  AllTiles() {
    asm volatile("sttilecfg %0" : "=m"(before_) : : "memory");
    TileConfig config;
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~AllTiles() {
    if (before_.palette)
      asm volatile("ldtilecfg %0" : : "m"(before_) : "memory");
    else
      asm volatile("tilerelease" : : : "memory");
  }

 private:
  TileConfig before_;
};

// Tiles 0-3 accumulate the four products of operands 4, 5 (left) and 6, 7 (right): four chains of 16 cycles hide the
// latency of 52, and a GEMM's inner loop has the same shape.
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
  const int64_t row_bytes = 64;
  asm volatile(
      "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%0,%1,1), %%tmm5\n\t"
      "tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm7"
      :
      : "r"(operand), "r"(row_bytes)
      : "memory");
}

// The first accumulator, as it lies in memory.
void store_result(void* result) {
  const int64_t row_bytes = 64;
  asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(result), "r"(row_bytes) : "memory");
}

int64_t multiply_bf16_tiles(int64_t rounds, float* sink) {
  alignas(64) bf16 operand[512];
  for (int i = 0; i < 512; ++i) operand[i] = to_bf16(static_cast<float>(i % 7 - 3) * 0.25f);
  alignas(64) float result[256];
  const int64_t operations = rounds * 4 * (16 * 16 * 32) * 2;
  {
    AllTiles tiles;
    load_operands(operand);
    if (rounds > 0) TILEWRIGHT_MULTIPLY_TILES("tdpbf16ps");
    store_result(result);
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
    AllTiles tiles;
    load_operands(operand);
    if (rounds > 0) TILEWRIGHT_MULTIPLY_TILES("tdpbssd");
    store_result(result);
  }
  *sink = static_cast<float>(result[0]);
  return operations;
}

}  // namespace

extern const ProbeKernels probe_amx;
const ProbeKernels probe_amx = {sum_values, multiply_fp32, multiply_bf16_tiles, multiply_int8_tiles};
}  // namespace tilewright
