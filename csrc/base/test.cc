// Tests of rounding, layouts and threads, which every kernel relies on.
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/half.h"
#include "base/memory_policy.h"
#include "base/parallel.h"
#include "base/tile.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

float float_from(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Round to nearest even by comparing with both neighbours in double, where every distance is exact.
uint16_t nearest_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t below = static_cast<uint16_t>(bits >> 16);  // towards zero
  const uint16_t above = static_cast<uint16_t>(below + 1);
  // Past the largest finite bf16 the next step is infinity, and rounds as if it were 2^128.
  const double far = (above & 0x7fff) == 0x7f80 ? std::ldexp(1.0, 128) : std::fabs(to_float(bf16{above}));
  const double to_below = std::fabs(static_cast<double>(value)) - std::fabs(to_float(bf16{below}));
  const double to_above = far - std::fabs(static_cast<double>(value));
  if (to_below != to_above) return to_below < to_above ? below : above;
  return below % 2 == 0 ? below : above;
}

template <class T>
void check_round_trip(T (*narrow)(float)) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(T{static_cast<uint16_t>(bits)});
    const T back = narrow(value);
    if (std::isnan(value))
      CHECK(std::isnan(to_float(back)));
    else
      CHECK(back.bits == bits);
  }
}

TEST(narrow_types_survive_the_round_trip) {
  check_round_trip<bf16>(to_bf16);
  check_round_trip<f16>(to_half);
}

TEST(bf16_rounds_to_nearest_even) {
  CHECK(to_bf16(float_from(0x3f808000)).bits == 0x3f80);  // a tie goes to the even neighbour, down
  CHECK(to_bf16(float_from(0x3f818000)).bits == 0x3f82);  // and up
  CHECK(to_bf16(float_from(0x3f808001)).bits == 0x3f81);
  CHECK(to_bf16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(to_bf16(-std::numeric_limits<float>::max()).bits == 0xff80);
  CHECK(to_bf16(std::numeric_limits<float>::infinity()).bits == 0x7f80);
  CHECK(to_bf16(-0.0f).bits == 0x8000);
  Random random(1);
  for (int i = 0; i < 1000000; ++i) {
    uint32_t bits = static_cast<uint32_t>(random.bits());
    if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;  // exact ties, which random bits almost never are
    const float value = float_from(bits);
    if (std::isfinite(value)) CHECK(to_bf16(value).bits == nearest_bf16(value));
  }
}

TEST(bf16_keeps_nan) {
  // The first and the last would become infinity or zero if they were rounded as numbers.
  for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
    CHECK(std::isnan(to_float(to_bf16(float_from(bits)))));
}

TEST(fp16_rounds_to_nearest_even) {
  // Between each number and the next: the middle goes to the even one, what is beside the middle to the nearer one.
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float below = to_float(f16{static_cast<uint16_t>(bits)}),
                above = to_float(f16{static_cast<uint16_t>(bits + 1)});
    const float middle = (below + above) / 2;
    for (const float sign : {1.0f, -1.0f}) {
      const uint32_t top = sign < 0 ? 0x8000 : 0;
      CHECK(to_half(sign * middle).bits == (top | (bits + bits % 2)));
      CHECK(to_half(sign * std::nextafter(middle, 0.0f)).bits == (top | bits));
      CHECK(to_half(sign * std::nextafter(middle, 1e6f)).bits == (top | (bits + 1)));
    }
  }
  CHECK(to_half(65519.0f).bits == 0x7bff && to_half(65520.0f).bits == 0x7c00 && to_half(-1e30f).bits == 0xfc00);
}

template <class T>
void check_tile_offsets() {
  std::vector<int> seen(kTileElements, 0);
  for (int depth = 0; depth < kTileDepth; ++depth)
    for (int column = 0; column < kTileColumns; ++column) {
      const int offset = tile_offset<T>(depth, column);
      CHECK(offset >= 0 && offset < kTileElements);
      ++seen[static_cast<size_t>(offset)];
      CHECK(offset / 32 == depth / 2);  // one row of a tile is one pair of depths
    }
  for (int count : seen) CHECK(count == 1);
}

template <class T>
void check_packed_offsets(int64_t num_outputs, int64_t depth) {
  const int64_t depth_tiles = ceil_div(depth, kTileDepth);
  const int64_t padded_outputs = round_up(num_outputs, kStripColumns), padded_depth = depth_tiles * kTileDepth;
  std::vector<int> seen(static_cast<size_t>(padded_outputs * padded_depth), 0);
  for (int64_t n = 0; n < padded_outputs; ++n)
    for (int64_t k = 0; k < padded_depth; ++k) {
      const int64_t offset = packed_offset<T>(n, k, depth_tiles);
      CHECK(offset >= 0 && offset < padded_outputs * padded_depth);
      ++seen[static_cast<size_t>(offset)];
      CHECK(offset / (kStripColumns * padded_depth) == n / kStripColumns);  // a strip is one contiguous stream
    }
  for (int count : seen) CHECK(count == 1);
}

TEST(tile_layouts_hold_every_element_once) {
  check_tile_offsets<bf16>();
  check_tile_offsets<float>();
  for (auto [num_outputs, depth] : {std::pair<int64_t, int64_t>{1, 1}, {16, 32}, {33, 31}, {70, 100}}) {
    check_packed_offsets<bf16>(num_outputs, depth);
    check_packed_offsets<float>(num_outputs, depth);
  }
}

void check_every_index_once(int64_t count) {
  std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
  parallel_for(count, [&](int64_t i) { ++visits[static_cast<size_t>(i)]; });
  for (const auto& visit : visits) CHECK(visit.load() == 1);
}

TEST(parallel_for_visits_every_index_once) {
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (int64_t count : {0, 1, 2, 3, 7, 64, 1001}) check_every_index_once(count);
  }
  set_num_threads(0);
}

TEST(parallel_chunks_are_in_range_and_no_longer_than_the_grain) {
  set_num_threads(3);
  for (int64_t grain : {0, 1, 4, 100}) {
    std::atomic<int64_t> total{0};
    parallel_chunks(37, grain, [&](int64_t begin, int64_t end) {
      CHECK(begin >= 0 && begin < end && end <= 37);
      // One chunk, or one thread, takes all at once.
      CHECK(end - begin <= (grain < 1 ? 1 : grain) || (begin == 0 && end == 37));
      total += end - begin;
    });
    CHECK(total.load() == 37);
  }
  set_num_threads(0);
}

TEST(parallel_for_from_several_threads_at_once) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([] {
      for (int i = 0; i < 20; ++i) check_every_index_once(101);
    });
  for (std::thread& caller : callers) caller.join();
  set_num_threads(0);
}

TEST(parallel_stages_start_when_the_one_before_is_done) {
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (int round = 0; round < 20; ++round) {
      const int64_t counts[] = {37, 0, 1, 101};
      std::atomic<int64_t> done[4] = {};
      parallel_stages(counts, [&](int stage, int64_t task) {
        CHECK(task >= 0 && task < counts[stage]);
        for (int before = 0; before < stage; ++before) CHECK(done[before].load() == counts[before]);
        ++done[stage];
      });
      for (int stage = 0; stage < 4; ++stage) CHECK(done[stage].load() == counts[stage]);
    }
  }
  set_num_threads(0);
}

TEST(threads_are_bound_and_released) {
  // On a thread of its own: the policy and the pins end with it.
  std::thread([] {
    cpu_set_t before, set;
    sched_getaffinity(0, sizeof(before), &before);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before)) ++cpu;
    set_num_threads(2);
    bind_threads(&cpu, 1);
    sched_getaffinity(0, sizeof(set), &set);
    CHECK(CPU_COUNT(&set) == 1 && CPU_ISSET(cpu, &set));
    bind_threads(nullptr, 0);
    sched_getaffinity(0, sizeof(set), &set);
    CHECK(CPU_EQUAL(&set, &before));
    set_num_threads(0);
  }).join();
}

TEST(memory_comes_from_known_nodes_only) {
  std::thread([] {
    const int none[] = {1023}, beyond[] = {1024}, negative[] = {-1};
    for (MemoryPolicy policy : {MemoryPolicy::prefer, MemoryPolicy::interleave}) {
      CHECK(set_memory_policy(policy, none, 1) != 0);
      CHECK(set_memory_policy(policy, beyond, 1) == EINVAL);
      CHECK(set_memory_policy(policy, negative, 1) == EINVAL);
    }
    // Refused, if at all, only where the system has no such call.
    const int error = set_memory_policy(MemoryPolicy::local, nullptr, 0);
    CHECK(error == 0 || error == ENOSYS || error == EPERM);
  }).join();
}

TEST(a_cap_leaves_the_levels_within_it) {
  for (const Level& cap : kLevels) {
    set_max_isa(cap.isa);
    for (const Level& level : kLevels) {
      const bool within = (level.features & ~cap.features) == 0;
      CHECK(may_use(level.isa) == (within && machine_has(level.isa)));
    }
    CHECK(may_use(active_isa()));
  }
  clear_max_isa();
  CHECK(may_use(Isa::scalar) && machine_has(active_isa()));
}

TEST(levels_are_listed_best_first_and_in_the_order_of_their_numbers) {
  for (int i = 0; i < kNumIsaLevels; ++i) {
    CHECK(static_cast<int>(kLevels[i].isa) == i);
    // No level stands behind one whose features it has and more: it would never be chosen.
    for (int j = 0; j < i; ++j) CHECK((kLevels[j].features & ~kLevels[i].features) != 0);
  }
}

TEST(denormals_are_flushed_within_the_scope) {
  volatile float least = 1.17549435e-38f, half = 0.5f;
  {
    const FlushDenormals flush;
    CHECK(least * half == 0.0f);
  }
  CHECK(least * half != 0.0f);
}

TEST(calls_of_a_region_follow_each_other) {
  for (int threads : {1, 2, 3, 16}) {
    set_num_threads(threads);
    std::vector<int64_t> values(100, 0), next(100);
    parallel_region([&] {
      for (int call = 0; call < 50; ++call) {
        parallel_chunks(100, 7, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) next[i] = values[99 - i] + 1;
        });
        parallel_for(100, [&](int64_t i) { values[i] = next[i]; });
      }
    });
    for (int64_t value : values) CHECK(value == 50);
  }
  set_num_threads(0);
}

TEST(regions_and_loops_within_a_region_or_a_task_start_no_team) {
  for (int threads : {1, 2, 3, 16}) {
    set_num_threads(threads);
    std::atomic<int> visits{0}, elsewhere{0};
    parallel_region([&] {
      parallel_region([&] { check_every_index_once(101); });
      const int64_t counts[] = {5, 2, 7};
      parallel_stages(counts, [&](int, int64_t) {
        const std::thread::id here = std::this_thread::get_id();
        parallel_for(4, [&](int64_t) {
          ++visits;
          elsewhere += std::this_thread::get_id() != here;
        });
        parallel_region([&] { elsewhere += std::this_thread::get_id() != here; });
      });
    });
    CHECK(visits == 4 * (5 + 2 + 7) && elsewhere == 0);
  }
  set_num_threads(0);
}

TEST(what_a_region_or_a_task_throws_reaches_the_caller_and_the_threads_go_on) {
  for (int threads : {1, 2, 3, 16}) {
    set_num_threads(threads);
    int caught = 0;
    auto attempt = [&](auto body) {
      try {
        body();
      } catch (const std::runtime_error&) {
        ++caught;
      }
      check_every_index_once(101);
    };
    auto throws_at_31 = [](int64_t i) {
      if (i == 31) throw std::runtime_error("31");
    };
    attempt([&] { parallel_for(64, throws_at_31); });
    attempt([&] { parallel_region([&] { parallel_for(64, throws_at_31); }); });
    attempt([&] { parallel_region([&] { throws_at_31(31); }); });
    parallel_region([&] {
      attempt([&] { parallel_for(64, throws_at_31); });  // and the region goes on
    });
    CHECK(caught == 4);
  }
  set_num_threads(0);
}

TEST(regions_of_several_threads_at_once) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([] {
      parallel_region([] {
        for (int i = 0; i < 20; ++i) check_every_index_once(101);
      });
    });
  for (std::thread& caller : callers) caller.join();
  set_num_threads(0);
}

struct Nest {
  std::atomic<int> outer[4] = {}, inner[4][3] = {};
};

TEST(run_workers_nested) {
  Nest nest;
  run_workers(
      4,
      [](void* context, int worker) {
        auto& outer_nest = *static_cast<Nest*>(context);
        ++outer_nest.outer[worker];
        struct Inner {
          Nest& nest;
          int outer_worker;
        } inner{outer_nest, worker};
        run_workers(
            3,
            [](void* inner_context, int inner_worker) {
              auto& [inner_nest, outer_worker] = *static_cast<Inner*>(inner_context);
              ++inner_nest.inner[outer_worker][inner_worker];
            },
            &inner);
      },
      &nest);
  for (int i = 0; i < 4; ++i) {
    CHECK(nest.outer[i].load() == 1);
    for (int j = 0; j < 3; ++j) CHECK(nest.inner[i][j].load() == 1);
  }
}

TEST(run_workers_runs_them_all_when_the_runtime_grants_fewer_threads) {
  omp_set_dynamic(1);  // the runtime may now give as few threads as the load suggests
  std::vector<std::atomic<int>> ran(64);
  run_workers(
      64,
      [](void* context, int worker) {
        ++(*static_cast<std::vector<std::atomic<int>>*>(context))[static_cast<size_t>(worker)];
      },
      &ran);
  omp_set_dynamic(0);
  for (const auto& count : ran) CHECK(count.load() == 1);
}

}  // namespace
}  // namespace tilewright::testing
