// Tests of x86 only.
#include <cstring>

#include "kernels/probe/probe.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

// torch's oneDNN remembers which tile configuration it loaded: a kernel must restore it.
TEST(the_tile_config_of_the_thread_is_kept) {
  if (!machine_has(Isa::amx)) return;
  alignas(64) uint8_t ours[64] = {1};  // palette 1, one tile of 3 rows of 12 bytes
  ours[16] = 12;
  ours[48] = 3;
  alignas(64) uint8_t after[64];
  float sink;
  asm volatile("ldtilecfg %0" : : "m"(ours) : "memory");
  probe_kernels().bf16(3, &sink);
  probe_kernels().int8(3, &sink);
  asm volatile("sttilecfg %0" : "=m"(after) : : "memory");
  CHECK(std::memcmp(ours, after, sizeof(ours)) == 0);
  asm volatile("tilerelease" : : : "memory");
  probe_kernels().bf16(3, &sink);
  asm volatile("sttilecfg %0" : "=m"(after) : : "memory");
  CHECK(after[0] == 0);
}

}  // namespace
}  // namespace tilewright::testing
