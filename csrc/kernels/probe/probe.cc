#include "kernels/probe/probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(probe, ProbeKernels)

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs fn(worker) on `num_workers` threads.
template <class Fn>
void on_workers(int num_workers, Fn& fn) {
  run_workers(num_workers, [](void* context, int worker) { (*static_cast<Fn*>(context))(worker); }, &fn);
}

// Makes the compiler treat a value as used.
void consume(float value) { asm volatile("" : : "g"(value)); }

int64_t run_rounds(MultiplyLoop loop, int64_t rounds) {
  float sink;
  const int64_t operations = loop(rounds, &sink);
  consume(sink);
  return operations;
}

// Returns as many rounds as take one or two milliseconds: long compared with starting the workers, short enough to fit
// between the time slices of other processes. Measured on the calling thread alone, as the best of three: neither a
// late worker nor a lost time slice must look like slow arithmetic.
int64_t rounds_for(MultiplyLoop loop) {
  for (int64_t rounds = 1024;; rounds *= 2) {
    double best = 1;
    for (int attempt = 0; attempt < 3; ++attempt) {
      const auto start = Clock::now();
      run_rounds(loop, rounds);
      best = std::min(best, seconds_since(start));
    }
    if (best >= 0.001) return rounds;
  }
}

// Its own memory, in huge pages if the system grants them: page walks are not what is measured.
class Mapping {
 public:
  explicit Mapping(int64_t size_bytes) : size_(static_cast<size_t>(size_bytes)) {
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, size_, MADV_HUGEPAGE);
  }
  ~Mapping() { munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  float* data() const { return static_cast<float*>(data_); }

 private:
  void* data_;
  size_t size_;
};

// `values` in slices of 32 MiB per worker, each cut into one part per worker at whole cache lines. Timed by slice, a
// few milliseconds each: another process that uses the CPU for a while spoils some of them, not the best.
class Slices {
 public:
  Slices(float* values, int64_t count, int num_workers)
      : values_(values), count_(count), slice_(num_workers * kValuesPerWorker), num_workers_(num_workers) {}

  int64_t num_slices() const { return (count_ + slice_ - 1) / slice_; }
  int64_t num_values(int64_t slice) const { return std::min(slice_, count_ - slice * slice_); }

  // Runs fn(first value, number of values) on every worker.
  template <class Fn>
  void on_parts(int64_t slice, Fn fn) const {
    const int64_t lines = num_values(slice) / kLine;
    const auto cut = [&](int i) { return i == num_workers_ ? num_values(slice) : lines * i / num_workers_ * kLine; };
    auto part = [&](int worker) { fn(values_ + slice * slice_ + cut(worker), cut(worker + 1) - cut(worker)); };
    on_workers(num_workers_, part);
  }

 private:
  static constexpr int64_t kValuesPerWorker = int64_t{8} << 20;
  static constexpr int64_t kLine = 16;
  float* values_;
  int64_t count_, slice_;
  int num_workers_;
};

}  // namespace

const ProbeKernels& probe_kernels() { return select(kTable); }

std::vector<std::vector<double>> read_bandwidth(int64_t size_bytes, const std::vector<int>& worker_counts,
                                                double seconds) {
  const ProbeKernels& kernels = probe_kernels();
  const Mapping buffer(size_bytes);
  const int64_t count = size_bytes / static_cast<int64_t>(sizeof(float));
  // First written by the worker that reads it later, so that its pages are on that worker's NUMA node.
  const Slices touched(buffer.data(), count, *std::max_element(worker_counts.begin(), worker_counts.end()));
  for (int64_t slice = 0; slice < touched.num_slices(); ++slice)
    touched.on_parts(slice, [](float* part, int64_t length) { std::fill(part, part + length, 1.0f); });

  std::vector<std::vector<double>> rates(worker_counts.size());
  const auto start = Clock::now();
  do {
    // One worker count reads the whole buffer before the next starts, which finds none of it in the caches.
    for (size_t i = 0; i < worker_counts.size(); ++i) {
      const Slices slices(buffer.data(), count, worker_counts[i]);
      for (int64_t slice = 0; slice < slices.num_slices(); ++slice) {
        const auto pass_start = Clock::now();
        slices.on_parts(slice, [&](const float* part, int64_t length) { consume(kernels.sum(part, length)); });
        const double size = static_cast<double>(slices.num_values(slice)) * sizeof(float);
        rates[i].push_back(size / seconds_since(pass_start));
      }
    }
  } while (seconds_since(start) < seconds);
  return rates;
}

std::vector<double> multiply_peak(MultiplyType type, int num_workers, double seconds) {
  const ProbeKernels& kernels = probe_kernels();
  const MultiplyLoop loop = type == MultiplyType::fp32   ? kernels.fp32
                            : type == MultiplyType::bf16 ? kernels.bf16
                                                         : kernels.int8;
  const int64_t rounds = rounds_for(loop);
  const double operations = static_cast<double>(run_rounds(loop, rounds)) * num_workers;
  auto multiply = [&](int) { run_rounds(loop, rounds); };
  std::vector<double> rates;
  const auto start = Clock::now();
  while (rates.size() < 3 || seconds_since(start) < seconds) {
    const auto pass_start = Clock::now();
    on_workers(num_workers, multiply);
    rates.push_back(operations / seconds_since(pass_start));
  }
  return rates;
}

}  // namespace tilewright
