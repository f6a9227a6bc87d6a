// x86-64's part of base/arch.h.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

namespace tilewright {

inline constexpr const char* kArchName = "x86_64";

// The ISA levels, best first.
enum class Isa : int { amx, avx512_bf16, avx512_vnni, avx512, avx2, scalar };
inline constexpr int kNumIsaLevels = 6;

// Second-level cache of a core, the largest of the machines we know.
inline constexpr int64_t kCoreCacheBytes = int64_t{2} << 20;

namespace {

// Yields the core to its other thread for some 40 cycles, or 140.
inline void pause_cpu() { _mm_pause(); }

// Denormal numbers are zero within a scope: a product that results in one costs some 150 cycles instead of half a
// cycle, and decays produce many.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // flush to zero, denormals are zero
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

}  // namespace
}  // namespace tilewright
