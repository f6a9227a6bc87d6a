#include "base/isa.h"

#include <asm/hwcap.h>
#include <sys/auxv.h>

namespace tilewright {
namespace {

enum : Features {
  kNeon = 1,     // every aarch64 that Linux runs on has it
  kDotprod = 2,  // sdot, udot: Neoverse N1 and later, Apple M1 and later
  kBf16 = 4,     // bfdot, bfmmla: Neoverse V1 and N2 and later, Apple M2 and later
  kI8mm = 8,     // smmla, on the same cores
  kFp16 = 16,    // arithmetic in fp16, not conversions alone: on every core with dot products so far
};

}  // namespace

const Level kLevels[kNumIsaLevels] = {
    {Isa::neon_bf16, "neon_bf16", kNeon | kDotprod | kBf16 | kI8mm},
    {Isa::neon_dotprod, "neon_dotprod", kNeon | kDotprod | kFp16},
    {Isa::neon, "neon", kNeon},
    {Isa::scalar, "scalar", 0},
};

Features detect_features() {
  const unsigned long caps = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
  Features features = 0;
  if (caps & HWCAP_ASIMD) features |= kNeon;
  if (caps & HWCAP_ASIMDDP) features |= kDotprod;
  if (caps & HWCAP_ASIMDHP) features |= kFp16;
  if (more & HWCAP2_BF16) features |= kBf16;
  if (more & HWCAP2_I8MM) features |= kI8mm;
  return features;
}

}  // namespace tilewright
