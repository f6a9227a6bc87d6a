// Memory that a kernel needs during one call, kept per thread so that no call pays for an allocation.
#pragma once

#include <cstddef>

namespace tilewright {

// Returns at least `bytes` bytes, 64-byte aligned, uninitialised; valid until this thread's next call.
void* thread_scratch(size_t bytes);

// Returns a second, independent buffer: for data that the caller shares with the workers of one call (packed operands),
// while thread_scratch serves each worker's own blocks.
void* shared_scratch(size_t bytes);

}  // namespace tilewright
