// Keys and values of every type into pages, against plain loops over the layout, between guard pages.
#include "kernels/kv_cache/kv_cache.h"

#include <cstring>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Case {
  int64_t page_size, heads, width;
  std::vector<int64_t> slots;
};

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> slots;
  for (int64_t slot = begin; slot < end; ++slot) slots.push_back(slot);
  return slots;
}

// Consecutive tokens that begin within a tile, tokens that are skipped, and one far from the others.
std::vector<int64_t> scattered() {
  std::vector<int64_t> slots = range(21, 70);
  slots[3] = -1;
  slots[40] = 159;
  slots.push_back(0);
  slots.push_back(-7);
  return slots;
}

const std::vector<Case> kCases = {
    {32, 1, 1, {31}},           {32, 2, 33, scattered()},    {64, 3, 40, range(60, 133)}, {32, 1, 256, {0, 33, -1, 64}},
    {64, 2, 64, range(0, 128)}, {32, 2, 128, range(30, 98)}, {96, 1, 32, range(32, 65)},  {32, 5, 15, scattered()},
};

// Location of value d of a token, as described in base/kv_layout.h: per page and head the keys, [page_size / 16][depth
// / 32] tiles of 32 dims by 16 tokens, then the values, [page_size / 32][columns / 16] tiles of 32 tokens by 16 dims.
struct Places {
  int64_t page_size, heads, width;

  int64_t key_elements() const { return page_size * ((width + 31) / 32 * 32); }
  int64_t value_elements() const { return page_size * ((width + 15) / 16 * 16); }
  int64_t head_elements() const { return key_elements() + value_elements(); }
  int64_t head_begin(int64_t slot, int64_t head) const { return (slot / page_size * heads + head) * head_elements(); }
  template <class C>
  static int64_t in_tile(int64_t depth, int64_t column) {
    return kIsBf16<C> ? depth / 2 * 32 + column * 2 + depth % 2 : depth * 16 + column;
  }
  template <class C>
  int64_t key(int64_t slot, int64_t head, int64_t d) const {
    const int64_t place = slot % page_size, tile = place / 16 * ((width + 31) / 32) + d / 32;
    return head_begin(slot, head) + tile * 512 + in_tile<C>(d % 32, place % 16);
  }
  template <class C>
  int64_t value(int64_t slot, int64_t head, int64_t d) const {
    const int64_t place = slot % page_size, tile = place / 32 * ((width + 15) / 16) + d / 16;
    return head_begin(slot, head) + key_elements() + tile * 512 + in_tile<C>(place % 32, d % 16);
  }
};

template <class C, class T>
C stored(T value) {
  C result;
  assign(result, to_float(value));
  return result;
}

template <class T, class C>
void check_store(const Case& c, Edge edge, bool strided) {
  const auto tokens = static_cast<int64_t>(c.slots.size());
  // Strided: heads as slices of a wider row, with a gap between tokens.
  const int64_t head_stride = strided ? c.width + 3 : c.width;
  const int64_t token_stride = strided ? c.heads * head_stride + 5 : c.heads * c.width;
  const int64_t input_elements = (tokens - 1) * token_stride + (c.heads - 1) * head_stride + c.width;
  const Places places = {c.page_size, c.heads, c.width};
  const int64_t num_pages = 5;
  Random random(static_cast<uint64_t>(tokens * 131 + c.width));
  GuardedBuffer<T> k(input_elements, edge), v(input_elements, edge);
  GuardedBuffer<int64_t> slots(tokens, edge);
  GuardedBuffer<C> pages(num_pages * c.heads * places.head_elements(), edge);
  k.fill(random);
  v.fill(random);
  std::memcpy(slots.data(), c.slots.data(), c.slots.size() * sizeof(int64_t));

  // Pages are full of NaN, and stay so wherever no token is written. What pads a value is undefined.
  std::vector<C> expected(pages.data(), pages.data() + pages.size());
  std::vector<bool> undefined(expected.size());
  for (int64_t t = 0; t < tokens; ++t) {
    if (c.slots[t] < 0) continue;
    for (int64_t head = 0; head < c.heads; ++head) {
      const int64_t from = t * token_stride + head * head_stride;
      for (int64_t d = 0; d < (c.width + 31) / 32 * 32; ++d)
        expected[places.key<C>(c.slots[t], head, d)] = d < c.width ? stored<C>(k[from + d]) : C{};
      for (int64_t d = 0; d < (c.width + 15) / 16 * 16; ++d) {
        const int64_t at = places.value<C>(c.slots[t], head, d);
        d < c.width ? void(expected[at] = stored<C>(v[from + d])) : void(undefined[at] = true);
      }
    }
  }

  KvStoreArgs args = {};
  args.k = heads_of(k, token_stride, head_stride);
  args.v = heads_of(v, token_stride, head_stride);
  args.pages = pages.data();
  args.kv_dtype = dtype_of<C>();
  args.layout = {c.page_size, c.heads, c.width};
  args.slots = slots.data();
  args.num_tokens = tokens;
  kv_store(args);

  CHECK(args.layout.page_elements() == c.heads * places.head_elements());
  for (int64_t i = 0; i < pages.size(); ++i) {
    if (undefined[i] || std::memcmp(&pages[i], &expected[i], sizeof(C)) == 0) continue;
    check(false,
          std::to_string(tokens) + " tokens, width " + std::to_string(c.width) + ": element " + std::to_string(i) +
              " of the pages is " + std::to_string(to_float(pages[i])) + ", expected " +
              std::to_string(to_float(expected[i])),
          __FILE__, __LINE__);
    return;
  }
}

void check_types(const Case& c, Edge edge, bool strided) {
  check_store<float, float>(c, edge, strided);
  check_store<float, bf16>(c, edge, strided);
  check_store<bf16, float>(c, edge, strided);
  check_store<bf16, bf16>(c, edge, strided);
}

TEST(keys_and_values_go_to_their_places) {
  for_each_isa([] {
    for (const Case& c : kCases)
      for (Edge edge : {Edge::end, Edge::start})
        for (bool strided : {false, true}) check_types(c, edge, strided);
  });
}

// Runs of tokens are shared among threads: no thread writes another thread's token.
TEST(kv_store_on_many_threads) {
  set_num_threads(7);
  check_types({64, 2, 64, range(3, 300)}, Edge::end, false);
  set_num_threads(0);
}

TEST(a_store_of_no_tokens_touches_nothing) {
  KvStoreArgs args = {};
  args.layout = {32, 1, 16};
  kv_store(args);
}

}  // namespace
}  // namespace tilewright::testing
