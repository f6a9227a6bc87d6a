#include "base/vec/avx512.h"

#include "kernels/probe/generic.h"
#include "kernels/probe/int8.h"

namespace tilewright {
namespace {

int64_t multiply_bf16(int64_t rounds, float* sink) {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.875f), _mm512_set1_ps(-0.75f));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.125f), _mm512_set1_ps(0.25f));
  Vec chains[kChains];
  for (Vec& chain : chains) chain = Vec::zero();
  for (int64_t round = 0; round < rounds; ++round)
    for (Vec& chain : chains) chain.v = _mm512_dpbf16_ps(chain.v, a, b);
  for (int c = 1; c < kChains; ++c) chains[0] = chains[0] + chains[c];
  *sink = reduce_add(chains[0]);
  return rounds * kChains * 2 * Vec::kLanes * 2;
}

}  // namespace

extern const ProbeKernels probe_avx512_bf16;
const ProbeKernels probe_avx512_bf16 = {sum_values, multiply_fp32, multiply_bf16, multiply_int8};
}  // namespace tilewright
