#include "kernels/probe/probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

#define KERNEL(isa, name) extern const ProbeKernels name;
#include "kernels/probe/kernels.inc"
#undef KERNEL

namespace {

constexpr Entry<ProbeKernels> kTable[] = {
#define KERNEL(isa, name) {Isa::isa, &name},
#include "kernels/probe/kernels.inc"
#undef KERNEL
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs fn(worker) on `num_workers` threads.
template <class Fn>
void on_workers(int num_workers, Fn& fn) {
  run_workers(num_workers, [](void* context, int worker) { (*static_cast<Fn*>(context))(worker); }, &fn);
}

// A value the compiler must believe is used.
void consume(float value) { asm volatile("" : : "x"(value)); }

int64_t run_rounds(MultiplyLoop loop, int64_t rounds) {
  float sink;
  const int64_t operations = loop(rounds, &sink);
  consume(sink);
  return operations;
}

// Memory of its own, in huge pages where the system grants them: page walks are not what is measured.
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

// [begin, end) of worker's part of `count` values, cut at whole cache lines.
struct Part {
  int64_t begin, end;
};
Part part_of(int64_t count, int worker, int num_workers) {
  constexpr int64_t kLine = 16;
  const int64_t lines = count / kLine;
  const auto cut = [&](int64_t i) { return i == num_workers ? count : lines * i / num_workers * kLine; };
  return {cut(worker), cut(worker + 1)};
}

}  // namespace

const ProbeKernels& probe_kernels() { return select(kTable); }

std::vector<std::vector<double>> read_bandwidth(int64_t size_bytes, const std::vector<int>& worker_counts,
                                                double seconds) {
  const ProbeKernels& kernels = probe_kernels();
  const Mapping buffer(size_bytes);
  const int64_t count = size_bytes / static_cast<int64_t>(sizeof(float));
  // Written first by the worker that reads it later, so that its pages are on that worker's NUMA node.
  const int most_workers = *std::max_element(worker_counts.begin(), worker_counts.end());
  auto touch = [&](int worker) {
    const Part part = part_of(count, worker, most_workers);
    std::fill(buffer.data() + part.begin, buffer.data() + part.end, 1.0f);
  };
  on_workers(most_workers, touch);

  std::vector<std::vector<double>> rates(worker_counts.size());
  const auto start = Clock::now();
  while (rates.back().size() < 3 || seconds_since(start) < seconds) {
    for (size_t i = 0; i < worker_counts.size(); ++i) {
      auto read = [&, num_workers = worker_counts[i]](int worker) {
        const Part part = part_of(count, worker, num_workers);
        consume(kernels.sum(buffer.data() + part.begin, part.end - part.begin));
      };
      const auto pass_start = Clock::now();
      on_workers(worker_counts[i], read);
      rates[i].push_back(static_cast<double>(size_bytes) / seconds_since(pass_start));
    }
  }
  return rates;
}

std::vector<double> multiply_peak(MultiplyType type, int num_workers, double seconds) {
  const ProbeKernels& kernels = probe_kernels();
  const MultiplyLoop loop = type == MultiplyType::fp32   ? kernels.fp32
                            : type == MultiplyType::bf16 ? kernels.bf16
                                                         : kernels.int8;
  // Long against starting the workers, short enough to fall between the turns of a busy neighbour. Found on the
  // calling thread alone: a worker that starts late must not pass for slow arithmetic.
  constexpr double kPassSeconds = 0.003;
  int64_t rounds = 1024, operations = 0;
  for (double elapsed = 0; elapsed < kPassSeconds; rounds *= 2) {
    const auto pass_start = Clock::now();
    operations = 2 * run_rounds(loop, rounds);
    elapsed = seconds_since(pass_start);
  }
  auto multiply = [&](int) { run_rounds(loop, rounds); };
  std::vector<double> rates;
  const auto start = Clock::now();
  while (rates.size() < 3 || seconds_since(start) < seconds) {
    const auto pass_start = Clock::now();
    on_workers(num_workers, multiply);
    rates.push_back(static_cast<double>(operations) * num_workers / seconds_since(pass_start));
  }
  return rates;
}

}  // namespace tilewright
