#include "base/isa.h"

#include <atomic>

namespace tilewright {
namespace {

constexpr Features kNoCap = ~Features{0};
std::atomic<Features> allowed{kNoCap};

Features machine_features() {
  static const Features features = detect_features();
  return features;
}

const Level& level_of(Isa isa) { return kLevels[static_cast<int>(isa)]; }

bool contains(Features features, Isa isa) { return (level_of(isa).features & ~features) == 0; }

}  // namespace

const char* name_of(Isa isa) { return level_of(isa).name; }

bool machine_has(Isa isa) { return contains(machine_features(), isa); }

bool may_use(Isa isa) { return contains(machine_features() & allowed.load(std::memory_order_relaxed), isa); }

Isa active_isa() {
  for (const Level& level : kLevels)
    if (may_use(level.isa)) return level.isa;
  return kLevels[kNumIsaLevels - 1].isa;
}

void set_max_isa(Isa cap) { allowed.store(level_of(cap).features, std::memory_order_relaxed); }

void clear_max_isa() { allowed.store(kNoCap, std::memory_order_relaxed); }

}  // namespace tilewright
