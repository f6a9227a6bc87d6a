// Which instruction sets this CPU and this OS grant, and which of them the kernels may use.
//
// A level is a set of features, and an architecture has a list of levels (isa.cc in its folder). A kernel is compiled
// for a level and runs wherever that level's features are, whatever else the machine has.
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

// Of this architecture: levels in the order of Isa, best first; the last one, scalar, needs nothing.
extern const Level kLevels[kNumIsaLevels];

// What the hardware has and the OS allows, including what a process must ask for.
Features detect_features();

const char* name_of(Isa isa);

// Whether this machine has all that a level needs, whatever the cap.
bool machine_has(Isa isa);

// Whether kernels of a level may be used now: the machine has it, and it needs nothing beyond the cap.
bool may_use(Isa isa);

// The best level that may be used.
Isa active_isa();

// From now on only features of level `cap` are used.
void set_max_isa(Isa cap);
void clear_max_isa();

}  // namespace tilewright
