// Packed weights passed from Python (ops/packed.py): a tensor, a PackedForm, and scales or None.
#pragma once

#include "base/packed_weight.h"
#include "bindings/tensor.h"

namespace tilewright {

WeightFormat format_named(const Op& op, const std::string& name);

// Returns the description in a PackedForm, without data. ValueError if no kernel of the active level reads it.
PackedWeight described_by(const Op& op, nb::handle form);

// Returns the weight with its data, whose sizes are {"_"} or, of several experts, {"E", "_"}.
PackedWeight packed_of(Op& op, const nb::tuple& packed, const char* name, std::initializer_list<const char*> sizes);

std::string to_string(const PackedWeight& weight);  // "gated [96, 32]"

}  // namespace tilewright
