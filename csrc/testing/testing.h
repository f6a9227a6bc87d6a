// The C++ test harness: small on purpose, so that the tests need nothing but a compiler.
//
//   TEST(rms_norm_of_odd_widths) { for_each_isa([&] { ...; check_close(y, expected, width, 1e-5f, "y"); }); }
//
// A failed check is printed and counted, the test goes on, and the executable ends with status 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/isa.h"
#include "base/rows.h"

namespace tilewright::testing {

struct Test {
  Test(const char* name, void (*body)());
  const char* name;
  void (*body)();
  Test* next = nullptr;
};

#define TEST(name)                                                              \
  static void test_##name();                                                    \
  static const ::tilewright::testing::Test register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) ::tilewright::testing::check((condition), #condition, __FILE__, __LINE__)

// Prints the failure with the active ISA level, and counts it.
void check(bool condition, const std::string& message, const char* file, int line);

// Runs body once per ISA level this CPU has, with the kernels capped at that level.
template <class Body>
void for_each_isa(Body body) {
  for (const Level& level : kLevels) {
    if (!machine_has(level.isa)) continue;
    set_max_isa(level.isa);
    body();
  }
  clear_max_isa();
}

// Numbers in [-1, 1), the same in every run.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
  uint64_t bits() {  // xorshift64
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }
  float value() { return static_cast<float>(static_cast<int64_t>(bits() >> 40) - (1 << 23)) / (1 << 23); }

 private:
  uint64_t state_;
};

enum class Edge { end, start };

// Bytes between two inaccessible pages; touching one ends the test with a fault. Built with TILEWRIGHT_TEST_SLACK those
// pages may be read: some emulators read what the mask of a load leaves out. A write ends the test in any case.
class GuardedBytes {
 public:
  GuardedBytes(size_t size_bytes, Edge edge);
  ~GuardedBytes();
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  char* data() const { return data_; }

 private:
  char* mapping_;
  size_t inner_bytes_;
  char* data_;
  size_t size_bytes_;
};

// Exactly `count` elements that end right before a forbidden page (Edge::end) or start right after one (Edge::start).
// ASan sees neither loads of matrix tiles nor masked accesses; the page does. Filled with 0xff, which is NaN in fp32
// and bf16: an element read before it is written, or never written, shows in the result. The rest of the pages on the
// open side is checked for stray writes at the end.
template <class T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(int64_t count, Edge edge = Edge::end)
      : bytes_(static_cast<size_t>(count) * sizeof(T), edge), count_(count) {
    poison();
  }
  void poison() { std::memset(bytes_.data(), 0xff, static_cast<size_t>(count_) * sizeof(T)); }
  void fill(Random& random, float scale = 1.0f, float offset = 0.0f) {
    for (int64_t i = 0; i < count_; ++i) assign(data()[i], random.value() * scale + offset);
  }
  T* data() const { return reinterpret_cast<T*>(bytes_.data()); }
  T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return count_; }

 private:
  GuardedBytes bytes_;
  int64_t count_;
};

// A buffer as a kernel argument: rows of `stride` elements, or tokens of adjacent heads.
template <class T>
Rows rows_of(const GuardedBuffer<T>& buffer, int64_t stride) {
  return {buffer.data(), stride, dtype_of<T>()};
}
template <class T>
Heads heads_of(const GuardedBuffer<T>& buffer, int64_t token_stride, int64_t head_stride) {
  return {buffer.data(), token_stride, head_stride, dtype_of<T>()};
}

// Checks |actual - expected| <= tolerance * max(1, |expected|) for all elements, expected being fp32 or double; a bf16
// `actual` may be off by one more rounding step (2^-8). Reports the first element that differs.
template <class T, class Expected>
void check_close(const T* actual, const Expected* expected, int64_t count, double tolerance, const std::string& what) {
  const double allowed = tolerance + (kIsBf16<T> ? 1.0 / 256 : 0.0);
  for (int64_t i = 0; i < count; ++i) {
    const double got = to_float(actual[i]), want = static_cast<double>(expected[i]);
    const double magnitude = want < 0 ? -want : want;
    const double error = got < want ? want - got : got - want;
    if (error <= allowed * (magnitude > 1 ? magnitude : 1)) continue;  // false for NaN
    check(false, what + "[" + std::to_string(i) + "] is " + std::to_string(got) + ", expected " + std::to_string(want),
          __FILE__, __LINE__);
    return;
  }
}

}  // namespace tilewright::testing
