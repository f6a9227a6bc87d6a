// The kernels of a GPU on a CPU: every thread of a block is a coroutine, which runs until it waits for the others.
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct uint4 {
  unsigned x, y, z, w;
};
struct Place {
  unsigned x, y, z;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace emulation {

constexpr int kStackBytes = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool is_done = false;
};
struct Group {
  int arrived = 0, generation = 0;
};

static std::vector<Fiber> fibers;
static std::vector<Group> warps;
static Group block;
static ucontext_t scheduler;
static int current;
static float exchanged[1024];
static void (*body)(void*);
static void* body_arguments;

static void wait_for(Group& group, int size) {
  int own = group.generation;
  if (++group.arrived == size) {
    group.arrived = 0;
    ++group.generation;
  }
  while (group.generation == own) swapcontext(&fibers[current].context, &scheduler);
}

static void enter() {
  body(body_arguments);
  fibers[current].is_done = true;
}

static void run_block() {
  int count = blockDim.x;
  fibers.assign(count, Fiber{});
  warps.assign(count / 32, Group{});
  block = Group{};
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool is_any = true; is_any;) {
    is_any = false;
    for (current = 0; current < count; ++current) {
      if (fibers[current].is_done) continue;
      is_any = true;
      threadIdx.x = current;
      swapcontext(&scheduler, &fibers[current].context);
    }
  }
}

template <class... Types, size_t... Indices>
void launch(void (*kernel)(Types...), std::index_sequence<Indices...>, unsigned x, unsigned y, unsigned threads,
            void** arguments) {
  auto call = [&] { kernel(*static_cast<Types*>(arguments[Indices])...); };
  body = [](void* own) { (*static_cast<decltype(call)*>(own))(); };
  body_arguments = &call;
  blockDim = {threads, 1, 1};
  gridDim = {x, y, 1};
  for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block();
  }
}

}  // namespace emulation

static inline void __syncthreads() { emulation::wait_for(emulation::block, blockDim.x); }
static inline void __syncwarp() { emulation::wait_for(emulation::warps[threadIdx.x / 32], 32); }
static inline float __shfl_xor_sync(unsigned, float value, int offset) {
  unsigned own = threadIdx.x;
  emulation::exchanged[own] = value;
  __syncwarp();
  float result = emulation::exchanged[own ^ offset];
  __syncwarp();
  return result;
}

#include "gpu_kernels.cu"

#define EXPORTED(name)                                                                                \
  template <class... Types>                                                                           \
  static void launch_##name(void (*kernel)(Types...), unsigned x, unsigned y, unsigned t, void** a) { \
    emulation::launch(kernel, std::index_sequence_for<Types...>{}, x, y, t, a);                       \
  }                                                                                                   \
  extern "C" void run_##name(unsigned x, unsigned y, unsigned threads, void** arguments) {            \
    launch_##name(name, x, y, threads, arguments);                                                    \
  }

EXPORTED(few_rows)
EXPORTED(rms_norm)
EXPORTED(norm_rope)
EXPORTED(store_rows)
EXPORTED(decode_attention)
EXPORTED(join_parts)
