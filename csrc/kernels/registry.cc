#include "kernels/manifest.h"

namespace tilewright {

#define OP(op) OpInfo info_of_##op();
TILEWRIGHT_OPS(OP)
#undef OP

const OpInfo* all_ops(int* count) {
#define OP(op) info_of_##op(),
  static const OpInfo ops[] = {TILEWRIGHT_OPS(OP)};
#undef OP
  *count = static_cast<int>(sizeof(ops) / sizeof(ops[0]));
  return ops;
}

}  // namespace tilewright
