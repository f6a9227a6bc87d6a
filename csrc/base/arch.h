// The architecture this is compiled for: the one place that asks. Each has in its folder what it has instead of the
// other: its ISA levels, its pause between two looks at a flag, its switch for denormal numbers.
#pragma once

#if defined(__x86_64__)
#include "base/x86/arch.h"
#elif defined(__aarch64__)
#include "base/arm/arch.h"
#else
#error "Tilewright has kernels for x86-64 and aarch64"
#endif
