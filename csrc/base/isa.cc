#include "base/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tilewright {
namespace {

uint64_t enabled_state_components() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool request_tile_permission() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}

Isa detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::scalar;
  const bool osxsave = c & (1u << 27);
  const bool fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave) return Isa::scalar;
  const uint64_t state = enabled_state_components();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::scalar;

  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
  const bool avx2 = (b & (1u << 5)) && (b & (1u << 3)) && (b & (1u << 8));  // with BMI1, BMI2
  if (!avx2 || !fma || !f16c || (state & kYmmState) != kYmmState) return Isa::scalar;

  constexpr uint32_t kAvx512 = (1u << 16) | (1u << 17) | (1u << 28) | (1u << 30) | (1u << 31);  // F DQ CD BW VL
  if ((b & kAvx512) != kAvx512 || (state & kZmmState) != kZmmState) return Isa::avx2;

  // Tile, bf16, int8; and VBMI, which every CPU with tiles has.
  const bool amx = (d & (1u << 24)) && (d & (1u << 22)) && (d & (1u << 25)) && (c & (1u << 1));
  uint32_t a1, b1, c1, d1;
  const bool bf16 = __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) && (a1 & (1u << 5));
  if (!bf16) return Isa::avx512;
  if (!amx || (state & kTileState) != kTileState || !request_tile_permission()) return Isa::avx512_bf16;
  return Isa::amx;
}

std::atomic<Isa> max_isa{Isa::amx};

}  // namespace

const char* name_of(Isa isa) {
  constexpr const char* kNames[kNumIsaLevels] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};
  return kNames[static_cast<int>(isa)];
}

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return std::min(detected_isa(), max_isa.load(std::memory_order_relaxed)); }

void set_max_isa(Isa cap) { max_isa.store(cap, std::memory_order_relaxed); }

}  // namespace tilewright
