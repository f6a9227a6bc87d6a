// Teams of plain threads, without the runtime that kernels share with torch: ThreadSanitizer understands how these
// wait.
#include "base/team.h"

#include <array>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

using std::chrono::microseconds;

// Time that threads spin before they sleep: none, a while, and always.
constexpr microseconds kPatience[] = {microseconds(0), microseconds(20), microseconds(1'000'000)};

// Runs lead(team) on this thread with `size` - 1 others in the team.
void with_team(int size, microseconds patience, const std::function<void(Team&)>& lead) {
  Team team(patience);
  std::vector<std::thread> others;
  for (int i = 1; i < size; ++i) others.emplace_back([&] { team.work(); });
  lead(team);
  team.dismiss();
  for (std::thread& other : others) other.join();
}

template <class Fn>
void run(Team& team, int64_t count, Fn fn) {
  team.run(count, [](void* context, int64_t task) { (*static_cast<Fn*>(context))(task); }, &fn);
}

void on_all_teams(const std::function<void(Team&)>& lead) {
  for (int size : {1, 2, 3, 16})
    for (microseconds patience : kPatience) with_team(size, patience, lead);
}

// Plain memory throughout: every call reads what the one before has written, by whatever thread.
TEST(a_call_begins_when_the_one_before_is_done) {
  on_all_teams([](Team& team) {
    std::array<std::vector<int64_t>, 2> values{std::vector<int64_t>(40), std::vector<int64_t>(40)};
    for (int64_t call = 0; call < 300; ++call) {
      const std::vector<int64_t>& in = values[call % 2];
      std::vector<int64_t>& out = values[(call + 1) % 2];
      run(team, 1 + call % 40, [&](int64_t task) { out[task] = in[39 - task] + 1; });
      for (int64_t task = 1 + call % 40; task < 40; ++task) out[task] = in[39 - task] + 1;
    }
    for (int64_t value : values[0]) CHECK(value == 300);
  });
}

TEST(a_team_that_sleeps_is_woken) {
  for (int size : {2, 5})
    with_team(size, microseconds(0), [](Team& team) {
      for (int call = 0; call < 20; ++call) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::atomic<int> visits{0};
        run(team, 10, [&](int64_t) { ++visits; });
        CHECK(visits == 10);
      }
    });
}

TEST(no_tasks_are_no_call) {
  on_all_teams([](Team& team) { run(team, 0, [](int64_t) { CHECK(false); }); });
}

TEST(a_team_is_shared_and_not_only_the_leader_works) {
  with_team(2, microseconds(100), [](Team& team) {
    // Each of two tasks waits for the other: one thread alone would never end.
    std::atomic<int> arrived{0};
    run(team, 2, [&](int64_t) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
    CHECK(arrived == 2);
  });
}

// 40 tasks of which those from `thrower` on throw. How many were begun.
int run_throwing(Team& team, int64_t thrower) {
  std::atomic<int> begun{0};
  std::string caught;
  try {
    run(team, 40, [&](int64_t task) {
      ++begun;
      if (task >= thrower) throw std::runtime_error("task");
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(caught == "task");
  return begun;
}

TEST(what_a_task_throws_is_thrown_by_the_call_and_the_team_goes_on) {
  on_all_teams([](Team& team) {
    for (int64_t thrower : {0, 7, 39})
      for (int round = 0; round < 5; ++round) {
        CHECK(run_throwing(team, thrower) > 0);
        std::atomic<int> visits{0};
        run(team, 40, [&](int64_t) { ++visits; });
        CHECK(visits == 40);
      }
  });
}

// With more threads, one may own an earlier task that it then does not begin.
TEST(after_a_task_that_throws_none_is_begun) {
  with_team(1, microseconds(0), [](Team& team) {
    for (int64_t thrower : {0, 7, 39}) CHECK(run_throwing(team, thrower) == thrower + 1);
  });
}

TEST(too_many_tasks_are_refused) {
  with_team(1, microseconds(0), [](Team& team) {
    bool refused = false;
    try {
      run(team, int64_t{1} << 32, [](int64_t) {});
    } catch (const std::length_error&) {
      refused = true;
    }
    CHECK(refused);
  });
}

}  // namespace
}  // namespace tilewright::testing
