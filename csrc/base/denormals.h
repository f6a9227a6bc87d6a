// Denormal numbers count as zero for the length of a scope: a product that ends in one costs some 150 cycles instead of
// half of one, and decays are full of them.
#pragma once

#include <xmmintrin.h>

namespace tilewright {
namespace {

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
