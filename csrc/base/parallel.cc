#include "base/parallel.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <exception>

#include "base/team.h"

namespace tilewright {
namespace {

cpu_set_t available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
  return set;
}

// Read at start-up, before any thread is bound: a bound caller would see one CPU.
const cpu_set_t initial_cpus = available_cpus();
const int default_threads = CPU_COUNT(&initial_cpus);
std::atomic<int> configured_threads{0};
thread_local bool works_alone = false;
thread_local Team* led_team = nullptr;  // the team that this thread leads; it is in no task

// Longer than the work that a step leaves to one thread, if each thread has a core. Waking sleepers takes some 5 us
// each; with fewer cores than threads, a spinning thread delays the one it waits for.
std::chrono::microseconds patience() {
  return std::chrono::microseconds(sleeps_soon() || num_threads() > default_threads ? 5 : 200);
}

// Makes `team` the one that this thread leads within a scope.
class Leading {
 public:
  explicit Leading(Team* team) : before_(led_team) { led_team = team; }
  ~Leading() { led_team = before_; }
  Leading(const Leading&) = delete;
  Leading& operator=(const Leading&) = delete;

 private:
  Team* before_;
};

}  // namespace

void work_alone() { works_alone = true; }

void set_num_threads(int num_threads) { configured_threads.store(num_threads, std::memory_order_relaxed); }

int num_threads() {
  if (works_alone) return 1;
  const int configured = configured_threads.load(std::memory_order_relaxed);
  return configured > 0 ? configured : default_threads;
}

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
  // The runtime may grant fewer threads than asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC): those it grants do the rest.
#pragma omp parallel num_threads(num_workers)
  for (int worker = omp_get_thread_num(); worker < num_workers; worker += omp_get_num_threads()) body(context, worker);
}

void run_region(void (*body)(void* context), void* context) {
  // Always the whole team: when the size changes between regions, the runtime ends and starts threads.
  const int size = num_threads();
  if (size <= 1 || omp_in_parallel()) return body(context);
  Team team(patience());
  std::exception_ptr failure;  // must not leave the block that the runtime runs
#pragma omp parallel num_threads(size)
  if (omp_get_thread_num() != 0) {
    team.work();
  } else {
    const Leading leading(&team);
    try {
      body(context);
    } catch (...) {
      failure = std::current_exception();
    }
    team.dismiss();
  }
  if (failure) std::rethrow_exception(failure);
}

void run_tasks(int64_t count, void (*body)(void* context, int64_t task), void* context) {
  if (Team* team = led_team) {
    const Leading in_task(nullptr);
    return team->run(count, body, context);
  }
  if (num_threads() <= 1 || omp_in_parallel()) {
    for (int64_t task = 0; task < count; ++task) body(context, task);
    return;
  }
  Team team(patience());
  team.hand_out(count, body, context);
#pragma omp parallel num_threads(num_threads())
  team.take_tasks();
  team.finish();
}

}  // namespace tilewright
