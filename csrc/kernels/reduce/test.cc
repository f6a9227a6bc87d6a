// Every reduce kernel of this machine against a plain loop in fp32, bit by bit: the order of the sum is the contract.
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/reduce/reduce.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

template <class X, class T>
std::vector<T> sums_in_order(const std::vector<std::unique_ptr<GuardedBuffer<X>>>& x, const GuardedBuffer<T>* addend) {
  std::vector<T> sums(static_cast<size_t>(x[0]->size()));
  for (int64_t i = 0; i < x[0]->size(); ++i) {
    float sum = to_float((*x[0])[i]);
    for (size_t summand = 1; summand < x.size(); ++summand) sum += to_float((*x[summand])[i]);
    if (addend) sum += to_float((*addend)[i]);
    assign(sums[i], sum);
  }
  return sums;
}

template <class T>
bool same_bits(const T* a, const T* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(T)) == 0;
}

template <class X, class T>
void check_reduce(int64_t size, int num_summands, Edge edge) {
  Random random(static_cast<uint64_t>(size * 100 + num_summands));
  std::vector<std::unique_ptr<GuardedBuffer<X>>> x;
  ReduceArgs args;
  args.num_summands = num_summands;
  args.count = size;
  args.x_dtype = dtype_of<X>();
  args.dtype = dtype_of<T>();
  for (int summand = 0; summand < num_summands; ++summand) {
    x.push_back(std::make_unique<GuardedBuffer<X>>(size, edge));
    x.back()->fill(random, 1 << summand % 8);  // of many sizes: another order gives other bits
    args.x[summand] = x.back()->data();
  }
  GuardedBuffer<T> addend(size, edge), out(size, edge), copy(size, edge);
  addend.fill(random);
  args.out = out.data();

  reduce(args);
  CHECK(same_bits(out.data(), sums_in_order<X, T>(x, nullptr).data(), size));

  args.addend = addend.data();
  args.copy = copy.data();
  out.poison();
  const int64_t cut = size / 3;  // two spans give what one gives
  reduce_span(args, 0, cut);
  reduce_span(args, cut, size);
  const std::vector<T> expected = sums_in_order<X, T>(x, &addend);
  CHECK(same_bits(out.data(), expected.data(), size));
  CHECK(same_bits(copy.data(), expected.data(), size));

  args.out = addend.data();  // in place, as a residual is
  reduce(args);
  CHECK(same_bits(addend.data(), expected.data(), size));
}

TEST(reduce_gives_the_bits_of_a_plain_loop) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t size : {1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 1000})
        for (int num_summands : {1, 2, 3, 4, 16, kMaxSummands}) {
          check_reduce<float, float>(size, num_summands, edge);
          check_reduce<bf16, bf16>(size, num_summands, edge);
          check_reduce<float, bf16>(size, num_summands, edge);
        }
  });
}

}  // namespace
}  // namespace tilewright::testing
