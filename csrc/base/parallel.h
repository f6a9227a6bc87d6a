// The one threading runtime of the kernels. docs/threads.md says why it is OpenMP and what was measured.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "base/arch.h"

namespace tilewright {

// Threads a kernel may use, counting the caller. 0 restores the default: the CPUs this process may run on.
void set_num_threads(int num_threads);
int num_threads();
// From now on kernels that this thread calls use no other: for work beside the main computation, whose team would
// otherwise share its cores with a second one.
void work_alone();

// Pins the runtime's threads, worker i to cpus[i % count]; the calling thread is worker 0. An empty list lets
// them run on the CPUs that the process had when this library was loaded.
void bind_threads(const int* cpus, int count);

// Runs body(context, worker) on `num_workers` threads, the caller among them, and returns when all are done.
void run_workers(int num_workers, void (*body)(void* context, int worker), void* context);

// Lets another thread have this CPU.
void yield_cpu();

// Runs fn(begin, end) over [0, count) in chunks of `grain`, handed out as threads ask for them: on shared or
// hyperthreaded cores no fixed split is fair.
template <class Fn>
void parallel_chunks(int64_t count, int64_t grain, Fn&& fn) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  // Always the whole team, even for fewer chunks: when the size changes from one call to the next, the runtime ends and
  // starts threads, which costs more than waking one that finds nothing to do.
  const int workers = num_threads();
  if (workers <= 1 || count <= grain) {
    fn(int64_t{0}, count);
    return;
  }
  struct Shared {
    std::remove_reference_t<Fn>& fn;
    std::atomic<int64_t> next;
    int64_t count, grain;
  } shared{fn, {0}, count, grain};
  run_workers(
      workers,
      [](void* context, int) {
        auto& s = *static_cast<Shared*>(context);
        for (int64_t begin; (begin = s.next.fetch_add(s.grain, std::memory_order_relaxed)) < s.count;)
          s.fn(begin, begin + s.grain < s.count ? begin + s.grain : s.count);
      },
      &shared);
}

// Runs fn(task) for every task in [0, count).
template <class Fn>
void parallel_for(int64_t count, Fn&& fn) {
  parallel_chunks(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) fn(task);
  });
}

// Runs fn(stage, task) for every task in [0, counts[stage]) of each stage in turn, a stage once all of the one before
// it are done, with one wake-up of the team: a fork and join costs as much as a small op.
template <int kStages, class Fn>
void parallel_stages(const int64_t (&counts)[kStages], Fn&& fn) {
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  if (num_threads() <= 1 || total <= 2) {
    for (int stage = 0; stage < kStages; ++stage)
      for (int64_t task = 0; task < counts[stage]; ++task) fn(stage, task);
    return;
  }
  struct Shared {
    std::remove_reference_t<Fn>& fn;
    const int64_t (&counts)[kStages];
    std::atomic<int64_t> next[kStages], done[kStages];
  } shared{fn, counts, {}, {}};
  run_workers(
      num_threads(),
      [](void* context, int) {
        auto& s = *static_cast<Shared*>(context);
        for (int stage = 0; stage < kStages; ++stage) {
          for (int64_t task; (task = s.next[stage].fetch_add(1, std::memory_order_relaxed)) < s.counts[stage];) {
            s.fn(stage, task);
            s.done[stage].fetch_add(1, std::memory_order_release);
          }
          if (stage == kStages - 1) return;  // the join waits for it
          // Whoever still works on this stage is a running thread: this wait ends. It yields in case that thread needs
          // this very CPU.
          for (int spins = 0; s.done[stage].load(std::memory_order_acquire) < s.counts[stage]; ++spins) {
            pause_cpu();
            if (spins > 2000) yield_cpu();
          }
        }
      },
      &shared);
}

// The chunk that gives each thread a few turns but no turn less work than `min_cost` of units of `unit_cost`
// (both in bytes touched): below some 16 KB the hand-over costs more than the work.
inline int64_t grain_for(int64_t count, int64_t unit_cost, int64_t min_cost = 32768) {
  int64_t grain = count / (num_threads() * 4);
  const int64_t least = unit_cost > 0 ? (min_cost + unit_cost - 1) / unit_cost : 1;
  if (grain < least) grain = least;
  return grain < 1 ? 1 : grain;
}

}  // namespace tilewright
