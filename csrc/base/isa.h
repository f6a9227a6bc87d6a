// Which instruction sets this CPU and this OS grant, and which one the kernels may use.
#pragma once

namespace tilewright {

// Ordered: a kernel of level L runs on every machine whose level is L or above.
enum class Isa : int { scalar, avx2, avx512, avx512_bf16, amx };

inline constexpr int kNumIsaLevels = 5;

const char* name_of(Isa isa);

// What the hardware has and the OS allows. For amx that includes the process's permission to use tile
// data, which is asked for once, here.
Isa detected_isa();

// min(detected, cap). The cap is Isa::amx until set_max_isa is called.
Isa active_isa();
void set_max_isa(Isa cap);

}  // namespace tilewright
