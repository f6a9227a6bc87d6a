// The int8 multiply loop in terms of Bytes and multiply_add_bytes, which loops_avx2.h and loops_avx512.h define.
#pragma once

namespace tilewright {
namespace {

int64_t multiply_int8(int64_t rounds, float* sink) {
  constexpr int kByteChains = 8;  // three instructions per step, so fewer chains fill the ports
  const Bytes b = set_bytes(-3);
  Bytes chains[kByteChains];
  for (int c = 0; c < kByteChains; ++c) chains[c] = set_bytes(static_cast<char>(c));
  // The chain's own bytes are the operand: a product with a constant one would be hoisted out of the loop.
  for (int64_t round = 0; round < rounds; ++round)
    for (int c = 0; c < kByteChains; ++c) chains[c] = multiply_add_bytes(chains[c], chains[c], b);
  for (int c = 1; c < kByteChains; ++c) chains[0] = multiply_add_bytes(chains[0], chains[c], b);
  int32_t first;
  __builtin_memcpy(&first, &chains[0], sizeof(first));
  *sink = static_cast<float>(first);
  return rounds * kByteChains * static_cast<int64_t>(sizeof(Bytes)) * 2;
}

}  // namespace
}  // namespace tilewright
