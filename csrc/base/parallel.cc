#include "base/parallel.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>

namespace tilewright {
namespace {

cpu_set_t available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
  return set;
}

// Read at start-up, before anyone binds a thread: a bound caller would see one CPU.
const cpu_set_t initial_cpus = available_cpus();
const int default_threads = CPU_COUNT(&initial_cpus);
std::atomic<int> configured_threads{0};
thread_local bool works_alone = false;

}  // namespace

void work_alone() { works_alone = true; }

void set_num_threads(int num_threads) { configured_threads.store(num_threads, std::memory_order_relaxed); }

int num_threads() {
  if (works_alone) return 1;
  const int configured = configured_threads.load(std::memory_order_relaxed);
  return configured > 0 ? configured : default_threads;
}

void yield_cpu() { sched_yield(); }

void bind_threads(const int* cpus, int count) {
#pragma omp parallel num_threads(num_threads())
  {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (count > 0)
      CPU_SET(cpus[omp_get_thread_num() % count], &set);
    else
      set = initial_cpus;
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  }
}

void run_workers(int num_workers, void (*body)(void* context, int worker), void* context) {
  if (num_workers <= 1 || omp_in_parallel()) {
    for (int worker = 0; worker < num_workers; ++worker) body(context, worker);
    return;
  }
  // The runtime may grant fewer threads than asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC): those it grants take the rest.
#pragma omp parallel num_threads(num_workers)
  for (int worker = omp_get_thread_num(); worker < num_workers; worker += omp_get_num_threads()) body(context, worker);
}

}  // namespace tilewright
