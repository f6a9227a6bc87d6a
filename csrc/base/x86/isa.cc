#include "base/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tilewright {
namespace {

enum : Features {
  kAvx2 = 1,    // with FMA, F16C, BMI1 and BMI2
  kAvx512 = 2,  // F, DQ, CD, BW, VL
  kAvx512Vnni = 4,
  kAvx512Bf16 = 8,
  kAmx = 16,  // tile, bf16, int8; and VBMI, which every CPU with tiles has
};

uint64_t enabled_state_components() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux lets a process use tile data once it has requested it.
bool request_tile_permission() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}

}  // namespace

const Level kLevels[kNumIsaLevels] = {
    {Isa::amx, "amx", kAvx2 | kAvx512 | kAvx512Vnni | kAvx512Bf16 | kAmx},
    {Isa::avx512_bf16, "avx512_bf16", kAvx2 | kAvx512 | kAvx512Vnni | kAvx512Bf16},
    {Isa::avx512_vnni, "avx512_vnni", kAvx2 | kAvx512 | kAvx512Vnni},
    {Isa::avx512, "avx512", kAvx2 | kAvx512},
    {Isa::avx2, "avx2", kAvx2},
    {Isa::scalar, "scalar", 0},
};

Features detect_features() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool osxsave = c & (1u << 27);
  const bool fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave) return 0;
  const uint64_t state = enabled_state_components();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  uint32_t a1, b1, c1, d1;
  const bool bf16 = __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) && (a1 & (1u << 5));

  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
  Features features = 0;
  const bool avx2 = (b & (1u << 5)) && (b & (1u << 3)) && (b & (1u << 8)) && fma && f16c;
  if (avx2 && (state & kYmmState) == kYmmState) features |= kAvx2;
  constexpr uint32_t kAvx512Bits = (1u << 16) | (1u << 17) | (1u << 28) | (1u << 30) | (1u << 31);
  if ((b & kAvx512Bits) == kAvx512Bits && (state & kZmmState) == kZmmState) {
    features |= kAvx512;
    if (c & (1u << 11)) features |= kAvx512Vnni;
    if (bf16) features |= kAvx512Bf16;
  }
  const bool amx = (d & (1u << 24)) && (d & (1u << 22)) && (d & (1u << 25)) && (c & (1u << 1));
#ifdef TILEWRIGHT_SIMULATE
  if (features & kAvx512Vnni) return features | kAvx512Bf16 | kAmx;
#endif
  if (amx && (state & kTileState) == kTileState && request_tile_permission()) features |= kAmx;
  return features;
}

}  // namespace tilewright
