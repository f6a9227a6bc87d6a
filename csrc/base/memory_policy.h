// Memory nodes that a thread's pages are allocated on. docs/parallel.md explains when each policy is used.
#pragma once

namespace tilewright {

enum class MemoryPolicy {
  local,       // the node of the CPU that first touches a page: what a thread has by default
  prefer,      // these nodes while they have free pages, then any: a full node slows us down, it does not end us
  interleave,  // these nodes in turn, page by page
};

// Sets the policy of the calling thread, which threads it starts later inherit. Returns 0, or an errno: ENOSYS or EPERM
// in containers that forbid the call, EINVAL for nodes without memory.
int set_memory_policy(MemoryPolicy policy, const int* nodes, int count);

}  // namespace tilewright
