#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/mel/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(mel, MelKernels) = {mel_logs, mel_finish};
}  // namespace tilewright
