#include "bindings/checks.h"

#include <algorithm>
#include <limits>

#include "kernels/embedding/embedding.h"

namespace tilewright {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

int64_t value_at(const void* data, DType dtype, int64_t place) {
  return dtype == DType::i64 ? static_cast<const int64_t*>(data)[place] : static_cast<const int32_t*>(data)[place];
}

}  // namespace

void Ids::run() const {
  const int64_t bad = first_out_of_range(data, dtype, count, limit);
  if (bad < 0) return;
  const std::string place = columns ? text(bad / columns) + ", " + text(bad % columns) : text(bad);
  Op(op).fail(std::string(name) + "[" + place + "] is " + text(value_at(data, dtype, bad)) + ", expected 0 to " +
              text(limit - 1));
}

void Slots::run() const {
  const int64_t bad = first_out_of_range(data, dtype, count, limit, std::numeric_limits<int64_t>::min());
  if (bad < 0) return;
  Op(op).fail(std::string(name) + "[" + text(bad) + "] is " + text(value_at(data, dtype, bad)) + ", the " + holder +
              " has " + text(limit) + " slots");
}

void Starts::run() const {
  const Op caller(op);
  OP_REQUIRE(caller, data[0] == 0, std::string(name) + "[0] is " + text(data[0]) + ", expected 0");
  for (int64_t i = 0; i < num_sequences; ++i)
    OP_REQUIRE(caller, data[i] <= data[i + 1],
               std::string(name) + " must not decrease, but [" + text(i) + "] is " + text(data[i]) + " and [" +
                   text(i + 1) + "] is " + text(data[i + 1]));
  OP_REQUIRE(caller, data[num_sequences] == num_tokens,
             std::string(name) + "[-1] is " + text(data[num_sequences]) + ", expected the " + text(num_tokens) +
                 " tokens of " + of_what);
}

void Pages::run() const {
  const Op caller(op);
  for (int64_t b = 0; b < num_sequences; ++b) {
    const int64_t keys = kv_lengths[b];
    const int64_t queries = query_starts[b + 1] - query_starts[b];
    OP_REQUIRE(caller, keys >= 0 && keys <= table_width * page_size,
               "kv_lengths[" + text(b) + "] is " + text(keys) + ", expected 0 to " + text(table_width * page_size) +
                   " (the block table's " + text(table_width) + " pages of " + text(page_size) + ")");
    OP_REQUIRE(
        caller, !causal || queries <= keys,
        "kv_lengths[" + text(b) + "] is " + text(keys) + ", expected at least the " + text(queries) + " new tokens");
    if (queries == 0) continue;
    int64_t first = window > 0 ? std::max<int64_t>(0, keys - queries - window + 1) : 0;
    first = first / kKeyBlock * kKeyBlock / page_size;
    const int32_t* row = block_table + b * table_stride;
    const int64_t bad = first_out_of_range(row + first, DType::i32, ceil_div(keys, page_size) - first, num_pages);
    OP_REQUIRE(caller, bad < 0,
               "block_table[" + text(b) + ", " + text(first + bad) + "] is " + text(row[first + bad]) +
                   ", expected 0 to " + text(num_pages - 1));
  }
}

}  // namespace tilewright
