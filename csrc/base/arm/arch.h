// aarch64's part of base/arch.h.
#pragma once

#include <cstdint>

namespace tilewright {

inline constexpr const char* kArchName = "aarch64";

// The ISA levels, best first.
enum class Isa : int { neon_bf16, neon_dotprod, neon, scalar };
inline constexpr int kNumIsaLevels = 4;

// Second-level cache of a core, as on a Neoverse N1 or V1; a V2 has twice that.
inline constexpr int64_t kCoreCacheBytes = int64_t{1} << 20;

namespace {

// Some 30 cycles. `yield`, which is meant for this, does nothing on most cores: a waiting thread would fetch the line
// it polls as fast as it can, and slow down its writer.
inline void pause_cpu() { __asm__ volatile("isb" ::: "memory"); }

// Denormal numbers are zero within a scope, as on machines where they are slow: results are equal.
class FlushDenormals {
 public:
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(saved_ | uint64_t{1} << 24) : "memory");  // FZ
  }
  ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace
}  // namespace tilewright
