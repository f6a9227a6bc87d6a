// Selects the architecture. Each one's folder defines its ISA levels, its pause instruction for spinning, and its
// switch for denormal numbers.
#pragma once

#if defined(__x86_64__)
#include "base/x86/arch.h"
#elif defined(__aarch64__)
#include "base/arm/arch.h"
#else
#error "Tilewright has kernels for x86-64 and aarch64"
#endif
