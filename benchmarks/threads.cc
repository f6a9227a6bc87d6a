// What a fork and join costs: the OpenMP runtime the kernels share with torch, against a pool of our own that spins.
//
//   g++ -std=c++20 -O3 -fopenmp -Icsrc benchmarks/threads.cc csrc/base/{parallel,team}.cc -o /tmp/threads &&
//   /tmp/threads
//
// Three patterns, interleaved, medians: regions back to back; regions with 200 us of serial work between them (the pool
// and OpenMP may have gone to sleep); and the mixed process, in which torch's OpenMP runs a region before each of ours:
// there a second pool and OpenMP spin against each other for the same cores.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "base/parallel.h"

namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Workers spin for a while on a generation counter, then sleep on it, as a pool made for latency would.
class SpinPool {
 public:
  explicit SpinPool(int size) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this] { work(); });
  }
  ~SpinPool() {
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  template <class Fn>
  void run(Fn fn) {
    job_ = [](void* context) { (*static_cast<Fn*>(context))(); };
    context_ = &fn;
    left_.store(static_cast<int>(threads_.size()));
    generation_.fetch_add(1);
    generation_.notify_all();
    fn();
    while (left_.load(std::memory_order_acquire)) __builtin_ia32_pause();
  }

 private:
  void work() {
    uint64_t seen = 0;
    for (;;) {
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen && spins < 20000; ++spins)
        __builtin_ia32_pause();
      generation_.wait(seen);
      seen = generation_.load();
      if (stop_) return;
      job_(context_);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> left_{0};
  std::atomic<bool> stop_{false};
  void (*job_)(void*) = nullptr;
  void* context_ = nullptr;
};

std::atomic<long> sink{0};

// About `us` microseconds of work that no cache or memory decides.
void busy(double us) {
  const auto start = Clock::now();
  long x = 0;
  while (microseconds_since(start) < us) ++x;
  sink.fetch_add(x, std::memory_order_relaxed);
}

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <class Ours, class Pool>
void compare(const char* what, Ours openmp, Pool pool, int rounds) {
  std::vector<double> a, b;
  for (int i = 0; i < rounds; ++i) {
    // Runs of 20, so that each is measured among its like and both see the same minutes of the machine.
    for (int j = 0; j < 20; ++j) a.push_back(openmp());
    for (int j = 0; j < 20; ++j) b.push_back(pool());
  }
  std::printf("%-44s OpenMP %7.1f us   own pool %7.1f us\n", what, median(a), median(b));
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : tilewright::num_threads();
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 50;
  tilewright::set_num_threads(threads);
  SpinPool pool(threads);
  auto time_openmp = [&] {
    const auto start = Clock::now();
    tilewright::run_workers(threads, [](void*, int) { busy(10); }, nullptr);
    return microseconds_since(start) - 10;
  };
  auto time_pool = [&] {
    const auto start = Clock::now();
    pool.run([] { busy(10); });
    return microseconds_since(start) - 10;
  };
  auto torch_region = [&] {
#pragma omp parallel num_threads(threads)
    busy(10);
  };
  std::printf("%d threads, 10 us of work each; what the region costs beyond that\n", threads);
  compare("back to back", time_openmp, time_pool, rounds);
  compare(
      "after 200 us of serial work", [&] { return busy(200), time_openmp(); }, [&] { return busy(200), time_pool(); },
      rounds);
  compare(
      "after a region of torch's OpenMP", [&] { return torch_region(), time_openmp(); },
      [&] { return torch_region(), time_pool(); }, rounds);
}
