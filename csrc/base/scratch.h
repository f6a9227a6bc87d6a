// Memory a kernel needs for the length of one call, kept by each thread so that no call pays for allocation.
#pragma once

#include <cstddef>

namespace tilewright {

// At least `bytes` bytes, 64-byte aligned, contents undefined; valid until this thread asks again.
void* thread_scratch(size_t bytes);

// The same, a second independent buffer: for what the caller shares with the workers of one call (packed
// operands), while thread_scratch serves each worker's own blocks.
void* shared_scratch(size_t bytes);

}  // namespace tilewright
