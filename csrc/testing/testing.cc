#include "testing/testing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace tilewright::testing {
namespace {

Test* first_test = nullptr;
Test** last_link = &first_test;
std::atomic<int> num_failures{0};

constexpr unsigned char kSlack = 0xa5;

#ifdef TILEWRIGHT_TEST_SLACK
constexpr int kOuterAccess = PROT_READ;
#else
constexpr int kOuterAccess = PROT_NONE;
#endif

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

Test::Test(const char* name, void (*body)()) : name(name), body(body) {
  *last_link = this;
  last_link = &next;
}

void check(bool condition, const std::string& message, const char* file, int line) {
  if (condition) return;
  // The first ones are enough; a broken kernel would print thousands.
  if (num_failures.fetch_add(1) < 20)
    std::printf("%s:%d: at level %s: %s\n", file, line, name_of(active_isa()), message.c_str());
}

GuardedBytes::GuardedBytes(size_t size_bytes, Edge edge) : size_bytes_(size_bytes) {
  const size_t page = page_bytes();
  inner_bytes_ = (size_bytes + page - 1) / page * page;
  void* mapping = mmap(nullptr, inner_bytes_ + 2 * page, kOuterAccess, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) std::abort();
  mapping_ = static_cast<char*>(mapping);
  char* inner = mapping_ + page;
  if (inner_bytes_ && mprotect(inner, inner_bytes_, PROT_READ | PROT_WRITE) != 0) std::abort();
  std::memset(inner, kSlack, inner_bytes_);
  data_ = edge == Edge::end ? inner + inner_bytes_ - size_bytes : inner;
}

GuardedBytes::~GuardedBytes() {
  const char* inner = mapping_ + page_bytes();
  for (const char* p = inner; p < inner + inner_bytes_; ++p) {
    if (p == data_) p += size_bytes_;
    if (p < inner + inner_bytes_ && static_cast<unsigned char>(*p) != kSlack) {
      check(false, "a byte outside the buffer was written, at " + std::to_string(p - data_) + " from its start",
            __FILE__, __LINE__);
      break;
    }
  }
  munmap(mapping_, inner_bytes_ + 2 * page_bytes());
}

int run_all(const char* filter) {
  int num_run = 0;
  for (const Test* test = first_test; test; test = test->next) {
    if (filter && !std::strstr(test->name, filter)) continue;
    const int failures_before = num_failures.load();
    test->body();
    ++num_run;
    std::printf("%s %s\n", num_failures.load() == failures_before ? "ok    " : "FAILED", test->name);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed checks, on %s, levels up to %s\n", num_run, num_failures.load(), kArchName,
              name_of(active_isa()));
  return num_run > 0 && num_failures.load() == 0 ? 0 : 1;
}

}  // namespace tilewright::testing

// With an argument: only the tests whose name contains it.
int main(int argc, char** argv) { return tilewright::testing::run_all(argc > 1 ? argv[1] : nullptr); }
