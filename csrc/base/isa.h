// Instruction sets of this CPU and OS, and which of them the kernels may use. A level is a set of features, and an
// architecture has a list of levels (isa.cc in its folder). A kernel is compiled for a level and runs on every machine
// with that level's features.
#pragma once

#include <cstdint>

#include "base/arch.h"

namespace tilewright {

using Features = uint32_t;  // one bit each, as the architecture numbers them

struct Level {
  Isa isa;
  const char* name;
  Features features;
};

// Levels of this architecture in the order of Isa, best first; the last one, scalar, needs nothing.
extern const Level kLevels[kNumIsaLevels];

// Features of the hardware that the OS allows, including those that a process must request.
Features detect_features();

const char* name_of(Isa isa);

// Whether this machine has all features of a level, whatever the cap.
bool machine_has(Isa isa);

// Whether kernels of a level may be used: the machine has it, and it needs nothing beyond the cap.
bool may_use(Isa isa);

// The best level that may be used.
Isa active_isa();

// Limits kernels to features of level `cap` from now on.
void set_max_isa(Isa cap);
void clear_max_isa();

}  // namespace tilewright
