// Both forms of the gated delta rule on vectors. Include after a Vec.
#pragma once

#include "kernels/gated_delta/step.h"
#include "kernels/gated_delta/vector_matrix.h"

#include "kernels/gated_delta/chunk.h"

namespace tilewright {
namespace {

void chunk(const GatedDeltaArgs& args, const DeltaItem& item) {
  if (args.q.dtype == DType::bf16)
    Chunks<VectorMatrix, bf16>(args, item).run();
  else
    Chunks<VectorMatrix, float>(args, item).run();
}

}  // namespace
}  // namespace tilewright
