// The threading runtime of the kernels. docs/threads.md explains why it is OpenMP, with measurements.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tilewright {

// Threads a kernel may use, counting the caller. 0 restores the default: the CPUs this process may run on.
void set_num_threads(int num_threads);
int num_threads();
// Lets kernels called by this thread use no others: for work beside the main computation, whose team would otherwise
// share its cores with a second one.
void work_alone();

// Pins the runtime's threads, worker i to cpus[i % count]; the calling thread is worker 0. An empty list unpins them,
// to the CPUs of the process when this library was loaded.
void bind_threads(const int* cpus, int count);

// Runs body(context, worker) on `num_workers` threads, including the caller, and returns when all are done.
void run_workers(int num_workers, void (*body)(void* context, int worker), void* context);

// Runs body(context) on the calling thread, while the rest of the team stays with it for every parallel_for inside:
// handing out work then takes a microsecond, where waking and joining a team of 16 takes 12 to 25 (docs/threads.md).
// Within another region, or a task, it only calls body(context).
void run_region(void (*body)(void* context), void* context);

// Runs body(context, task) for every task in [0, count), handed out on demand: on shared or hyperthreaded cores no
// fixed split is fair. Outside a region it is its own region; within a task the tasks run one by one. The first
// exception of a task is rethrown after the tasks under way have ended.
void run_tasks(int64_t count, void (*body)(void* context, int64_t task), void* context);

template <class Fn>
void parallel_region(Fn&& fn) {
  using Body = std::remove_reference_t<Fn>;
  run_region([](void* context) { (*static_cast<Body*>(context))(); }, &fn);
}

// Runs fn(task) for every task in [0, count).
template <class Fn>
void parallel_for(int64_t count, Fn&& fn) {
  if (count <= 1 || num_threads() <= 1) {
    for (int64_t task = 0; task < count; ++task) fn(task);
    return;
  }
  using Body = std::remove_reference_t<Fn>;
  run_tasks(count, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); }, &fn);
}

// Runs fn(begin, end) over [0, count) in chunks of `grain`.
template <class Fn>
void parallel_chunks(int64_t count, int64_t grain, Fn&& fn) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  if (num_threads() <= 1 || count <= grain) {
    fn(int64_t{0}, count);
    return;
  }
  parallel_for((count + grain - 1) / grain, [&](int64_t chunk) {
    const int64_t begin = chunk * grain;
    fn(begin, begin + grain < count ? begin + grain : count);
  });
}

// Runs fn(stage, task) for every task in [0, counts[stage]) of each stage in turn, a stage once all of the previous one
// are done, with one wake-up of the team.
template <int kStages, class Fn>
void parallel_stages(const int64_t (&counts)[kStages], Fn&& fn) {
  auto run = [&] {
    for (int stage = 0; stage < kStages; ++stage) parallel_for(counts[stage], [&](int64_t task) { fn(stage, task); });
  };
  // If only one stage has several tasks, it is a region of its own anyway.
  int num_shared = 0;
  for (int64_t count : counts) num_shared += count > 1;
  num_shared > 1 ? parallel_region(run) : run();
}

// Returns the chunk size that gives each thread a few chunks, but no chunk less work than `min_cost` for units of
// `unit_cost` (both in bytes touched): below some 16 KB the hand-over costs more than the work.
inline int64_t grain_for(int64_t count, int64_t unit_cost, int64_t min_cost = 32768) {
  int64_t grain = count / (num_threads() * 4);
  const int64_t least = unit_cost > 0 ? (min_cost + unit_cost - 1) / unit_cost : 1;
  if (grain < least) grain = least;
  return grain < 1 ? 1 : grain;
}

}  // namespace tilewright
