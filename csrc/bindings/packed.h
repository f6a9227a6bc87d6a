// Packed weights as they come from Python (ops/packed.py): a tensor, a PackedForm, and scales or None.
#pragma once

#include "base/packed_weight.h"
#include "bindings/tensor.h"

namespace tilewright {

WeightFormat format_named(const Op& op, const std::string& name);

// What a PackedForm says, without data. ValueError where no kernel of the level in use reads such a weight.
PackedWeight described_by(const Op& op, nb::handle form);

// The weight with its data, whose sizes are {"_"} or, of several experts, {"E", "_"}.
PackedWeight packed_of(Op& op, const nb::tuple& packed, const char* name, std::initializer_list<const char*> sizes);

std::string to_string(const PackedWeight& weight);  // "gated [96, 32]"

}  // namespace tilewright
