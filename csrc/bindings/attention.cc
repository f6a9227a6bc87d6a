#include "kernels/attention/attention.h"

#include <algorithm>

#include "bindings/tensor.h"
#include "kernels/kv_cache/kv_cache.h"

namespace tilewright {
namespace {

constexpr DTypes kInt32 = one_of({DType::i32});
constexpr int kMaxHeadWidth = 256;

std::string text(int64_t value) { return std::to_string(value); }

// A cache is [pages, G, elements of one head] with the page size and head width it was made for.
KvLayout layout_of(Op& op, const Tensor& pages, int64_t page_size, int64_t head_width) {
  KvLayout layout = {page_size, op["G"], head_width};
  OP_REQUIRE(op, page_size > 0 && page_size % kTileDepth == 0,
             "page_size is " + text(page_size) + ", expected a multiple of 32");
  OP_REQUIRE(op, head_width >= 1 && head_width <= kMaxHeadWidth,
             "head width is " + text(head_width) + ", expected 1 to 256");
  OP_REQUIRE(op, pages.size(2) == layout.head_elements(),
             "cache has " + text(pages.size(2)) + " elements per head and page, expected " +
                 text(layout.head_elements()) + " for pages of " + text(page_size) + " tokens and heads of " +
                 text(head_width));
  op.contiguous(pages);
  return layout;
}

void check_starts(const Op& op, const Tensor& starts, int64_t num_tokens, const char* of_what) {
  const int32_t* s = starts.as<int32_t>();
  const int64_t last = starts.size(0) - 1;
  OP_REQUIRE(op, s[0] == 0, std::string(starts.name) + "[0] is " + text(s[0]) + ", expected 0");
  for (int64_t i = 0; i < last; ++i)
    OP_REQUIRE(op, s[i] <= s[i + 1],
               std::string(starts.name) + " must not decrease, but [" + text(i) + "] is " + text(s[i]) + " and [" +
                   text(i + 1) + "] is " + text(s[i + 1]));
  OP_REQUIRE(op, s[last] == num_tokens,
             std::string(starts.name) + "[-1] is " + text(s[last]) + ", expected the " + text(num_tokens) +
                 " tokens of " + of_what);
}

// q and out are [T, H, K].
AttentionArgs query_args(Op& op, const Tensor& q, const Tensor& out, int64_t kv_heads, const Tensor& starts,
                         float scale, bool causal, int64_t window, float soft_cap) {
  op.same_dtype(q, out);
  OP_REQUIRE(op, kv_heads > 0 && op["H"] % kv_heads == 0,
             "q has " + text(op["H"]) + " heads, expected a multiple of the " + text(kv_heads) + " kv heads");
  OP_REQUIRE(op, window >= 0, "window is " + text(window) + ", expected 0 (none) or more");
  OP_REQUIRE(op, soft_cap >= 0, "soft_cap must not be negative");
  OP_REQUIRE(op, starts.size(0) >= 1, "query_starts is empty, expected B + 1 entries");
  check_starts(op, starts, op["T"], "q");
  AttentionArgs args = {};
  args.q = op.heads(q);
  args.out = op.heads(out);
  args.query_starts = starts.as<int32_t>();
  args.num_sequences = starts.size(0) - 1;
  args.num_heads = op["H"];
  args.scale = scale;
  args.causal = causal;
  args.window = window;
  args.soft_cap = soft_cap;
  return args;
}

// Every page that some query of the sequence may read must be in the cache.
void check_pages(const Op& op, const AttentionArgs& args, int64_t num_pages, int64_t table_width) {
  for (int64_t b = 0; b < args.num_sequences; ++b) {
    const int64_t keys = args.kv_lengths[b];
    const int64_t queries = args.query_starts[b + 1] - args.query_starts[b];
    OP_REQUIRE(op, keys >= 0 && keys <= table_width * args.layout.page_size,
               "kv_lengths[" + text(b) + "] is " + text(keys) + ", expected 0 to " +
                   text(table_width * args.layout.page_size) + " (the block table's " + text(table_width) +
                   " pages of " + text(args.layout.page_size) + ")");
    OP_REQUIRE(
        op, !args.causal || queries <= keys,
        "kv_lengths[" + text(b) + "] is " + text(keys) + ", expected at least the " + text(queries) + " new tokens");
    if (queries == 0) continue;
    int64_t first = args.window > 0 ? std::max<int64_t>(0, keys - queries - args.window + 1) : 0;
    first = first / kKeyBlock * kKeyBlock / args.layout.page_size;
    for (int64_t i = first; i < ceil_div(keys, args.layout.page_size); ++i) {
      const int32_t page = args.block_table[b * args.block_table_stride + i];
      OP_REQUIRE(
          op, page >= 0 && page < num_pages,
          "block_table[" + text(b) + ", " + text(i) + "] is " + text(page) + ", expected 0 to " + text(num_pages - 1));
    }
  }
}

void bind_paged(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "paged_attention",
      [](nb::handle q_arg, nb::handle cache_arg, int64_t page_size, nb::handle table_arg, nb::handle starts_arg,
         nb::handle lengths_arg, nb::handle out_arg, float scale, bool causal, int64_t window, float soft_cap) {
        Op op("paged_attention");
        const Tensor q = op.tensor(q_arg, "q", {"T", "H", "K"}, kFloats);
        const Tensor out = op.tensor(out_arg, "out", {"T", "H", "K"}, kFloats);
        const Tensor cache = op.tensor(cache_arg, "cache", {"_", "G", "_"}, kFloats);
        const Tensor table = op.tensor(table_arg, "block_table", {"B", "_"}, kInt32);
        const Tensor lengths = op.tensor(lengths_arg, "kv_lengths", {"B"}, kInt32);
        const Tensor starts = op.tensor(starts_arg, "query_starts", {"_"}, kInt32);
        OP_REQUIRE(op, starts.size(0) == op["B"] + 1,
                   "query_starts has " + text(starts.size(0)) + " entries, expected " + text(op["B"] + 1));
        const KvLayout layout = layout_of(op, cache, page_size, op["K"]);
        AttentionArgs args = query_args(op, q, out, layout.num_heads, starts, scale, causal, window, soft_cap);
        args.pages = cache.data;
        args.kv_dtype = cache.dtype;
        args.layout = layout;
        args.block_table = table.as<int32_t>();
        args.block_table_stride = table.stride(0);
        args.kv_lengths = lengths.as<int32_t>();
        check_pages(op, args, cache.size(0), table.size(1));
        launch(paged_attention, args);
      },
      "q"_a, "cache"_a, "page_size"_a, "block_table"_a, "query_starts"_a, "kv_lengths"_a, "out"_a, "scale"_a,
      "causal"_a, "window"_a, "soft_cap"_a);

  m.def("kv_head_elements",
        [](int64_t page_size, int64_t head_width) { return KvLayout{page_size, 1, head_width}.head_elements(); });

  m.def("kv_store",
        [](nb::handle k_arg, nb::handle v_arg, nb::handle cache_arg, int64_t page_size, nb::handle slots_arg) {
          Op op("kv_store");
          const Tensor k = op.tensor(k_arg, "k", {"T", "G", "K"}, kFloats);
          const Tensor v = op.tensor(v_arg, "v", {"T", "G", "K"}, kFloats);
          const Tensor cache = op.tensor(cache_arg, "cache", {"_", "G", "_"}, kFloats);
          const Tensor slots = op.tensor(slots_arg, "slots", {"T"}, one_of({DType::i64}));
          op.same_dtype(k, v);
          KvStoreArgs args = {};
          args.layout = layout_of(op, cache, page_size, op["K"]);
          args.k = op.heads(k);
          args.v = op.heads(v);
          args.pages = cache.data;
          args.kv_dtype = cache.dtype;
          args.slots = slots.as<int64_t>();
          args.num_tokens = op["T"];
          for (int64_t t = 0; t < args.num_tokens; ++t)
            OP_REQUIRE(op, args.slots[t] < cache.size(0) * page_size,
                       "slots[" + text(t) + "] is " + text(args.slots[t]) + ", the cache has " +
                           text(cache.size(0) * page_size));
          launch(kv_store, args);
        });
}

void bind_varlen(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "varlen_attention",
      [](nb::handle q_arg, nb::handle k_arg, nb::handle v_arg, nb::handle query_starts_arg, nb::handle key_starts_arg,
         nb::handle mask_arg, nb::handle out_arg, float scale, bool causal, int64_t window, float soft_cap) {
        Op op("varlen_attention");
        const Tensor q = op.tensor(q_arg, "q", {"T", "H", "K"}, kFloats);
        const Tensor k = op.tensor(k_arg, "k", {"S", "G", "K"}, kFloats);
        const Tensor v = op.tensor(v_arg, "v", {"S", "G", "K"}, kFloats);
        const Tensor out = op.tensor(out_arg, "out", {"T", "H", "K"}, kFloats);
        const Tensor query_starts = op.tensor(query_starts_arg, "query_starts", {"starts"}, kInt32);
        const Tensor key_starts = op.tensor(key_starts_arg, "key_starts", {"starts"}, kInt32);
        const Tensor mask = op.optional(mask_arg, "mask", {"_", "_", "_", "_"}, kFloats | one_of({DType::boolean}));
        op.same_dtype(q, k);
        op.same_dtype(q, v);
        OP_REQUIRE(op, op["K"] >= 1 && op["K"] <= kMaxHeadWidth,
                   "head width is " + text(op["K"]) + ", expected 1 to 256");
        VarlenArgs args = {};
        args.attention = query_args(op, q, out, op["G"], query_starts, scale, causal, window, soft_cap);
        check_starts(op, key_starts, op["S"], "k");
        args.attention.kv_dtype = k.dtype;
        args.attention.layout = {0, op["G"], op["K"]};
        args.k = op.heads(k);
        args.v = op.heads(v);
        args.key_starts = key_starts.as<int32_t>();
        if (mask) {
          const int32_t *qs = args.attention.query_starts, *ks = args.key_starts;
          int64_t queries = 0, keys = 0;
          for (int64_t b = 0; b < args.attention.num_sequences; ++b) {
            queries = std::max<int64_t>(queries, qs[b + 1] - qs[b]);
            keys = std::max<int64_t>(keys, ks[b + 1] - ks[b]);
          }
          OP_REQUIRE(op,
                     (mask.size(0) == 1 || mask.size(0) == args.attention.num_sequences) &&
                         (mask.size(1) == 1 || mask.size(1) == op["H"]) &&
                         (mask.size(2) == 1 || mask.size(2) >= queries) && mask.size(3) >= keys,
                     "mask is " + to_string(mask) + ", expected [1 or B=" + text(args.attention.num_sequences) +
                         ", 1 or H=" + text(op["H"]) + ", 1 or at least " + text(queries) + ", at least " + text(keys) +
                         "]");
          auto stride = [&](int axis) { return mask.size(axis) == 1 ? 0 : mask.stride(axis); };
          args.attention.mask = {mask.data, mask.dtype, stride(0), stride(1), stride(2)};
        }
        launch(varlen_attention, args);
      },
      "q"_a, "k"_a, "v"_a, "query_starts"_a, "key_starts"_a, "mask"_a.none(), "out"_a, "scale"_a, "causal"_a,
      "window"_a, "soft_cap"_a);
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_paged(m);
  bind_varlen(m);
}

}  // namespace tilewright
