// Tests collectives with threads as ranks, each with its own mapping of one segment, against plain loops, bit by bit.
// Slots of one page make pipelines of small messages.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/parallel.h"
#include "kernels/norm/norm.h"
#include "parallel/collective.h"
#include "parallel/waiting.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kPage = 4096;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

struct Descriptor {
  explicit Descriptor(int fd) : fd(fd) {}
  ~Descriptor() { close(fd); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

// Runs body(group) on a thread per rank.
void with_ranks(int num_ranks, const std::function<void(SharedGroup&)>& body, double timeout_s = 60,
                int64_t slot_bytes = kPage) {
  const Descriptor segment(Segment::create(num_ranks, slot_bytes));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      SharedGroup group(segment.fd, rank, "test", timeout_s);
      body(group);
    });
  for (auto& thread : threads) thread.join();
}

// Element i of rank `rank`'s message `seed`: of many magnitudes, so that sums in another order have other bits.
float value(int rank, int64_t seed, int64_t i) {
  Random random(static_cast<uint64_t>(seed * 1000003 + rank * 10007 + i));
  return random.value() * static_cast<float>(1 << random.bits() % 12);
}

template <class T>
void fill(const GuardedBuffer<T>& x, int rank, int64_t seed) {
  for (int64_t i = 0; i < x.size(); ++i) assign(x[i], value(rank, seed, i));
}

template <class T>
float rounded(int rank, int64_t seed, int64_t i) {
  T stored;
  assign(stored, value(rank, seed, i));
  return to_float(stored);
}

template <class T>
float sum_in_order(int num_ranks, int64_t seed, int64_t i) {
  float sum = rounded<T>(0, seed, i);
  for (int rank = 1; rank < num_ranks; ++rank) sum += rounded<T>(rank, seed, i);
  return sum;
}

// out[i] has the bits of expected(i), rounded to T, for all i.
template <class T, class Expected>
void check_bits(const GuardedBuffer<T>& out, Expected expected, const std::string& what) {
  for (int64_t i = 0; i < out.size(); ++i) {
    T want;
    assign(want, expected(i));
    if (std::memcmp(&out[i], &want, sizeof(T)) == 0) continue;
    return check(false,
                 what + "[" + std::to_string(i) + "] of " + std::to_string(out.size()) + " is " +
                     std::to_string(to_float(out[i])) + ", expected " + std::to_string(to_float(want)),
                 __FILE__, __LINE__);
  }
}

template <class T>
void check_all_reduce(SharedGroup& group, int64_t count, Edge edge, bool in_place) {
  GuardedBuffer<T> x(count, edge), out(count, edge);
  fill(x, group.rank(), count);
  all_reduce({&group, x.data(), in_place ? x.data() : out.data(), count, dtype_of<T>()});
  check_bits(in_place ? x : out, [&](int64_t i) { return sum_in_order<T>(group.size(), count, i); }, "all_reduce");
}

template <class T>
void check_reduce_scatter(SharedGroup& group, int64_t count, Edge edge) {
  GuardedBuffer<T> x(count * group.size(), edge), out(count, edge);
  fill(x, group.rank(), count);
  reduce_scatter({&group, x.data(), out.data(), count, dtype_of<T>()});
  check_bits(
      out, [&](int64_t i) { return sum_in_order<T>(group.size(), count, group.rank() * count + i); }, "reduce_scatter");
}

// `left_out` columns of the last ranks are padding; rows of x and out lie a few elements apart.
template <class T>
void check_all_gather(SharedGroup& group, int64_t rows, int64_t width, Edge edge, int64_t left_out = 0) {
  const int64_t out_width = width * group.size() - left_out, x_stride = width + 3, out_stride = out_width + 2;
  GuardedBuffer<T> x((rows - 1) * x_stride + width, edge), out((rows - 1) * out_stride + out_width, edge);
  fill(x, group.rank(), width);
  fill(out, group.size(), width);  // not a rank: what lies between rows must stay
  all_gather(
      {&group, {x.data(), x_stride, dtype_of<T>()}, {out.data(), out_stride, dtype_of<T>()}, rows, width, out_width});
  check_bits(
      out,
      [&](int64_t i) {
        const int64_t row = i / out_stride, column = i % out_stride, rank = column / width;
        if (column >= out_width) return value(group.size(), width, i);
        return value(static_cast<int>(rank), width, row * x_stride + column % width);
      },
      "all_gather");
}

template <class T>
void check_broadcast(SharedGroup& group, int64_t count, Edge edge) {
  const int root = static_cast<int>(count % group.size());
  GuardedBuffer<T> x(count, edge);
  if (group.rank() == root) fill(x, root, count);
  broadcast({&group, x.data(), count, root, dtype_of<T>()});
  check_bits(x, [&](int64_t i) { return value(root, count, i); }, "broadcast");
}

constexpr int kResidual = 100;  // not a rank: the same on all

// x of type X, the residual and what it becomes of type T.
template <class X, class T>
void check_all_reduce_add(SharedGroup& group, int64_t count, Edge edge, bool in_place) {
  GuardedBuffer<X> x(count, edge);
  GuardedBuffer<T> residual(count, edge), out(count, edge);
  fill(x, group.rank(), count);
  fill(residual, kResidual, count);
  all_reduce_add({&group, x.data(), residual.data(), in_place ? residual.data() : out.data(), count, dtype_of<X>(),
                  dtype_of<T>()});
  check_bits(
      in_place ? residual : out,
      [&](int64_t i) { return sum_in_order<X>(group.size(), count, i) + rounded<T>(kResidual, count, i); },
      "all_reduce_add");
}

// The residual bit by bit; its norm as computed by rms_norm, which has its own test.
template <class X, class T>
void check_all_reduce_norm(SharedGroup& group, int64_t rows, int64_t width, Edge edge) {
  GuardedBuffer<X> x(rows * width, edge);
  GuardedBuffer<T> residual(rows * width, edge), out(rows * width, edge), normed(rows * width, edge);
  GuardedBuffer<float> weight(width, edge);
  fill(x, group.rank(), width);
  fill(residual, kResidual, width);
  fill(weight, kResidual, width);
  AllReduceNormArgs args;
  args.group = &group;
  args.x = x.data();
  args.residual = residual.data();
  args.out = out.data();
  args.weight = weight.data();
  args.rows = rows;
  args.width = width;
  args.eps = 1e-6f;
  args.x_dtype = dtype_of<X>();
  args.dtype = dtype_of<T>();
  all_reduce_norm(args);
  check_bits(
      residual, [&](int64_t i) { return sum_in_order<X>(group.size(), width, i) + rounded<T>(kResidual, width, i); },
      "all_reduce_norm, residual");

  NormArgs norm;
  norm.x = {residual.data(), width, 0, dtype_of<T>()};
  norm.y = {normed.data(), width, 0, dtype_of<T>()};
  norm.weight = weight.data();
  norm.outer = rows;
  norm.width = width;
  norm.eps = 1e-6f;
  norm.weight_dtype = DType::f32;
  rms_norm(norm);
  check_bits(out, [&](int64_t i) { return to_float(normed[i]); }, "all_reduce_norm");
}

// x and a residual of types X and T.
template <class X, class T>
void check_residuals(SharedGroup& group, Edge edge) {
  for (int64_t count : {1, 17, 1025, 5003}) {
    check_all_reduce_add<X, T>(group, count, edge, false);
    check_all_reduce_add<X, T>(group, count, edge, true);
  }
  for (int64_t width : {1, 33, 200}) {
    check_all_reduce_norm<X, T>(group, 3, width, edge);
    check_all_reduce_norm<X, T>(group, 5000 / width + 1, width, edge);
  }
}

template <class T>
void check_all(SharedGroup& group, Edge edge) {
  // Around a page of elements, which is all that goes in one phase, a slice's lines, and several chunks.
  for (int64_t count : {1, 2, 15, 64, 1000, 1024, 1025, 2049, 5003, 20000}) {
    check_all_reduce<T>(group, count, edge, false);
    check_all_reduce<T>(group, count, edge, true);
  }
  for (int64_t count : {1, 3, 1000, 3001}) {
    check_reduce_scatter<T>(group, count, edge);
    check_broadcast<T>(group, count, edge);
    check_all_gather<T>(group, 1, count, edge);
  }
  check_all_gather<T>(group, 7, 333, edge);
  check_all_gather<T>(group, 1500, 1, edge);
  check_all_gather<T>(group, 7, 333, edge, 100);
  check_all_gather<T>(group, 7, 333, edge, 333 * group.size() - 1);  // one column of rank 0
  barrier({&group});
}

TEST(collectives_give_the_bits_of_plain_loops) {
  for_each_isa([] {
    set_num_threads(1);
    for (int num_ranks : {1, 2, 3, 5})
      with_ranks(num_ranks, [](SharedGroup& group) {
        check_all<float>(group, Edge::end);
        check_all<bf16>(group, Edge::start);
        check_residuals<float, float>(group, Edge::end);
        check_residuals<bf16, bf16>(group, Edge::start);
        check_residuals<float, bf16>(group, Edge::end);
      });
    set_num_threads(0);
  });
}

// Slots large enough that a window has several tasks for a team to share.
void check_large_messages(SharedGroup& group) {
  check_all_reduce<float>(group, 100000, Edge::end, true);
  check_all_reduce<bf16>(group, 150001, Edge::end, false);
  check_reduce_scatter<bf16>(group, 60001, Edge::end);
  check_all_gather<float>(group, 3, 30001, Edge::end);
  check_broadcast<float>(group, 90001, Edge::end);
  check_all_reduce_add<float, bf16>(group, 150001, Edge::end, true);
  check_all_reduce_norm<bf16, bf16>(group, 130, 1000, Edge::end);
  check_all_reduce_norm<float, bf16>(group, 130, 1000, Edge::end);
}

TEST(the_threads_of_a_team_share_large_messages) {
  set_num_threads(3);
  with_ranks(2, check_large_messages, 60, 64 * kPage);
  // By a team that stays, as in a replayed step.
  with_ranks(2, [](SharedGroup& group) { parallel_region([&] { check_large_messages(group); }); }, 60, 64 * kPage);
  set_num_threads(0);
}

// The largest number of ranks, most of them waiting for a CPU: they sleep, and none is forgotten.
TEST(many_ranks_on_few_cores) {
  set_num_threads(1);
  with_ranks(kMaxRanks, [](SharedGroup& group) {
    for (int64_t count : {1, 4097, 20000}) check_all_reduce<float>(group, count, Edge::end, true);
    for (int i = 0; i < 20; ++i) barrier({&group});
  });
  set_num_threads(0);
}

// Ranks that are alternately early and late, longer than they spin: slots must not be written while others read them.
TEST(ranks_out_of_step) {
  set_num_threads(1);
  with_ranks(3, [](SharedGroup& group) {
    Random random(static_cast<uint64_t>(group.rank() + 1));
    for (int64_t round = 0; round < 150; ++round) {
      if (random.bits() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.bits() % 300));
      const int64_t count = 1 + round * 37 % 1500;
      check_all_reduce<float>(group, count, Edge::end, true);
      if (round % 5 == 0) check_broadcast<float>(group, count, Edge::end);
      if (round % 7 == 0) check_reduce_scatter<float>(group, count, Edge::end);
    }
  });
  set_num_threads(0);
}

TEST(numbers_of_barriers_wrap_around) {
  const Descriptor segment(Segment::create(2, kPage));
  const Segment mapped(segment.fd);
  for (Seat& seat : mapped.header().seats) seat.arrived = 0xfffffffa;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      SharedGroup group(segment.fd, rank, "test", 20);
      for (int64_t count = 1; count < 20; ++count) check_all_reduce<float>(group, count, Edge::end, true);
    });
  for (auto& thread : threads) thread.join();
  CHECK(mapped.header().seats[0].arrived == 13);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CollectiveError& error) {
    return error.what();
  }
  return "no error";
}

void check_text(const std::string& text, const std::string& expected) {
  check(text == expected, "the error is \"" + text + "\", expected \"" + expected + "\"", __FILE__, __LINE__);
}

TEST(a_rank_that_does_not_come_is_named) {
  const auto began = Clock::now();
  const auto body = [](SharedGroup& group) {
    barrier({&group});
    if (group.rank() == 1 || group.rank() == 2) return;
    check_text(error_of([&] { check_all_reduce<float>(group, 5, Edge::end, true); }),
               "group 'test', all_reduce, operation 2: ranks 1 and 2 did not arrive within 0.2 s; the group is broken");
    check_text(error_of([&] { barrier({&group}); }),
               "group 'test', barrier, operation 3: ranks 1 and 2 did not arrive at operation 2 within 0.2 s; the "
               "group is broken");
  };
  with_ranks(4, body, 0.2);
  CHECK(seconds_since(began) < 10);
}

TEST(a_rank_that_does_not_come_ends_the_region_of_those_who_wait) {
  set_num_threads(3);
  with_ranks(
      2,
      [](SharedGroup& group) {
        if (group.rank() == 1) return;
        check_text(error_of([&] { parallel_region([&] { barrier({&group}); }); }),
                   "group 'test', barrier, operation 1: rank 1 did not arrive within 0.1 s; the group is broken");
        std::atomic<int> visits{0};
        parallel_for(100, [&](int64_t) { ++visits; });
        CHECK(visits == 100);
      },
      0.1);
  set_num_threads(0);
}

TEST(an_abort_wakes_those_who_wait) {
  const Descriptor segment(Segment::create(3, kPage));
  const auto began = Clock::now();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      SharedGroup group(segment.fd, rank, "test", 60);
      for (const char* text : {"group 'test', barrier, operation 1: rank 2 was lost; the group is broken",
                               "group 'test', barrier, operation 2: rank 2 was lost; the group is broken"})
        check_text(error_of([&] { barrier({&group}); }), text);
    });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  Segment launcher(segment.fd);
  abort_group(launcher, 2);
  abort_group(launcher, 1);  // the first stays
  for (auto& thread : threads) thread.join();
  CHECK(seconds_since(began) < 10);
}

// Posts far apart and close together: each is seen once, by spinning and by sleeping ranks.
TEST(posts_are_seen_once_each) {
  std::atomic<int> posted{0};
  with_ranks(3, [&](SharedGroup& group) {
    for (int i = 1; i <= 200; ++i) {
      if (group.rank() == 0) {
        if (i % 20 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        posted = i;
        group.post();
      } else {
        group.wait_for_post(group.rank() == 1 ? 0 : 100);
        CHECK(posted >= i);
      }
      if (i % 10 == 0) barrier({&group});  // rank 0 is ahead until here
    }
  });
}

TEST(those_who_wait_for_a_post_hear_of_a_failure) {
  const auto began = Clock::now();
  const Descriptor segment(Segment::create(3, kPage));
  std::vector<std::thread> threads;
  for (int rank = 1; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      SharedGroup group(segment.fd, rank, "test", 0.01);
      check_text(error_of([&] { group.wait_for_post(rank == 1 ? 0 : 1e6); }),
                 "group 'test', wait_for_post: rank 0 was lost; the group is broken");
    });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  Segment launcher(segment.fd);
  abort_group(launcher, 0);
  for (auto& thread : threads) thread.join();
  CHECK(seconds_since(began) < 10);
}

TEST(a_group_may_be_closed_by_another_thread_or_rank) {
  const Descriptor segment(Segment::create(2, kPage));
  SharedGroup group(segment.fd, 1, "test", 60), first(segment.fd, 0, "test", 60);
  std::thread waiting([&] {
    group.wait_for_post(0);
    check_text(error_of([&] { group.wait_for_post(0); }), "group 'test', wait_for_post: rank 1 has closed the group");
  });
  first.post();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  group.close();
  waiting.join();
  check_text(error_of([&] { group.wait_for_post(0); }), "group 'test': wait_for_post after close");
  check_text(error_of([&] { barrier({&first}); }), "group 'test', barrier, operation 1: rank 1 has closed the group");
  check_text(error_of([&] { first.post(); }), "group 'test', post: rank 1 has closed the group");
}

struct Interrupted {};

// As a handler of Python raises: waiting ranks learn whose it was.
TEST(a_handler_may_end_a_wait) {
  static std::atomic<bool> raise;
  raise = true;
  set_signal_check([] {
    if (raise.exchange(false)) throw Interrupted{};
  });
  const auto interrupted = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Interrupted&) {
      return true;
    }
    return false;
  };
  const Descriptor segment(Segment::create(2, kPage));
  SharedGroup group(segment.fd, 1, "test", 60), first(segment.fd, 0, "test", 60);
  CHECK(interrupted([&] { group.wait_for_post(0); }));
  first.post();
  group.wait_for_post(0);  // the wait goes on where it was
  raise = true;
  CHECK(interrupted([&] { barrier({&group}); }));
  check_text(error_of([&] { barrier({&first}); }),
             "group 'test', barrier, operation 1: rank 1 was interrupted; the group is broken");
  set_signal_check(nullptr);
}

TEST(ranks_that_came_for_different_things) {
  with_ranks(2, [](SharedGroup& group) {
    std::vector<float> x(8);
    const std::string text = error_of([&] {
      if (group.rank() == 0)
        all_reduce({&group, x.data(), x.data(), 8, DType::f32});
      else
        broadcast({&group, x.data(), 4, 1, DType::bf16});
    });
    const char* expected[] = {
        "group 'test', all_reduce, operation 1: rank 1 came for broadcast of 4 bfloat16 from rank 1, rank 0 for "
        "all_reduce of 8 float32; the group is broken",
        "group 'test', broadcast, operation 1: rank 0 came for all_reduce of 8 float32, rank 1 for broadcast of 4 "
        "bfloat16 from rank 1; the group is broken"};
    check_text(text, expected[group.rank()]);
    check_text(error_of([&] { barrier({&group}); }),
               "group 'test', barrier, operation 2: ranks 0 and 1 did not come for the same at operation 1; the group "
               "is broken");
  });
}

TEST(two_threads_of_a_rank_are_told) {
  const Descriptor segment(Segment::create(2, kPage));
  SharedGroup group(segment.fd, 0, "test", 60);
  std::thread first([&] {
    check_text(error_of([&] { barrier({&group}); }),
               "group 'test', barrier, operation 1: rank 1 was lost; the group is broken");
  });
  Segment mapped(segment.fd);
  while (mapped.header().seats[0].arrived == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  check_text(error_of([&] { barrier({&group}); }),
             "group 'test': barrier while another thread of this rank is in a collective of it");
  check_text(error_of([&] { group.close(); }), "group 'test': closed while a collective is under way");
  abort_group(mapped, 1);
  first.join();
}

TEST(a_closed_group_says_so) {
  with_ranks(1, [](SharedGroup& group) {
    group.close();
    group.close();
    check_text(error_of([&] { barrier({&group}); }), "group 'test': barrier after close");
  });
}

TEST(what_is_no_segment_or_no_rank_is_refused) {
  const auto refused = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refused([] { Segment::create(0, kPage); }));
  CHECK(refused([] { Segment::create(kMaxRanks + 1, kPage); }));
  CHECK(refused([] { Segment::create(2, kPage + 1); }));
  const Descriptor file(fileno(std::tmpfile()));
  CHECK(refused([&] { Segment segment(file.fd); }));
  const Descriptor segment(Segment::create(2, kPage));
  CHECK(refused([&] { SharedGroup group(segment.fd, 2, "test", 60); }));
  CHECK(refused([&] { SharedGroup group(segment.fd, 0, "test", 0); }));
  SharedGroup first(segment.fd, 0, "test", 60);
  CHECK(refused([&] { SharedGroup second(segment.fd, 0, "test", 60); }));
}

}  // namespace
}  // namespace tilewright::testing
