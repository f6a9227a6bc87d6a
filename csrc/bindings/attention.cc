#include "kernels/attention/attention.h"

#include <algorithm>

#include "bindings/checks.h"
#include "bindings/tensor.h"
#include "kernels/kv_cache/kv_cache.h"

namespace tilewright {
namespace {

constexpr DTypes kInt32 = one_of({DType::i32});
constexpr DTypes kBytes = one_of({DType::u8});

std::string text(int64_t value) { return std::to_string(value); }

KvFormat format_of(int64_t format) {
  if (format < 0 || format > static_cast<int64_t>(KvFormat::fp8))
    throw nb::value_error(("format is " + text(format) + ", expected 0, 1 (int8) or 2 (fp8)").c_str());
  return static_cast<KvFormat>(format);
}

// A cache is [pages, G, elements of one head], with the page size and head width it was created for.
KvLayout layout_of(Op& op, const Tensor& pages, int64_t page_size, int64_t head_width, int64_t format) {
  KvLayout layout = {page_size, op["G"], head_width, format_of(format)};
  const DTypes expected = layout.format == KvFormat::same ? kFloats : kBytes;
  OP_REQUIRE(op, one_of({pages.dtype}) & expected,
             "cache is " + std::string(name_of(pages.dtype)) + ", which is not the type of its format");
  OP_REQUIRE(op, page_size > 0 && page_size % kTileDepth == 0,
             "page_size is " + text(page_size) + ", expected a multiple of 32");
  OP_REQUIRE(op, head_width >= 1 && head_width <= kMaxHeadWidth,
             "head width is " + text(head_width) + ", expected 1 to " + text(kMaxHeadWidth));
  OP_REQUIRE(op, pages.size(2) == layout.head_elements(),
             "cache has " + text(pages.size(2)) + " elements per head and page, expected " +
                 text(layout.head_elements()) + " for pages of " + text(page_size) + " tokens and heads of " +
                 text(head_width));
  op.contiguous(pages);
  return layout;
}

// q and out are [T, H, K].
AttentionArgs query_args(const Op& op, const Tensor& q, const Tensor& out, int64_t kv_heads, const Tensor& starts,
                         float scale, bool causal, int64_t window, float soft_cap) {
  op.same_dtype(q, out);
  OP_REQUIRE(op, kv_heads > 0 && op["H"] % kv_heads == 0,
             "q has " + text(op["H"]) + " heads, expected a multiple of the " + text(kv_heads) + " kv heads");
  OP_REQUIRE(op, window >= 0, "window is " + text(window) + ", expected 0 (none) or more");
  OP_REQUIRE(op, soft_cap >= 0, "soft_cap must not be negative");
  OP_REQUIRE(op, starts.size(0) >= 1, "query_starts is empty, expected B + 1 entries");
  require_of_inputs(Starts{op.name(), starts.name, "q", starts.as<int32_t>(), starts.size(0) - 1, op["T"]});
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

void bind_paged(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "paged_attention",
      [](nb::handle q_arg, nb::handle cache_arg, int64_t page_size, int64_t format, nb::handle table_arg,
         nb::handle starts_arg, nb::handle lengths_arg, nb::handle out_arg, float scale, bool causal, int64_t window,
         float soft_cap) {
        Op op("paged_attention");
        const Tensor q = op.tensor(q_arg, "q", {"T", "H", "K"}, kFloats);
        const Tensor out = op.tensor(out_arg, "out", {"T", "H", "K"}, kFloats);
        const Tensor cache = op.tensor(cache_arg, "cache", {"_", "G", "_"}, kFloats | kBytes);
        const Tensor table = op.tensor(table_arg, "block_table", {"B", "_"}, kInt32);
        const Tensor lengths = op.tensor(lengths_arg, "kv_lengths", {"B"}, kInt32);
        const Tensor starts = op.tensor(starts_arg, "query_starts", {"_"}, kInt32);
        OP_REQUIRE(op, starts.size(0) == op["B"] + 1,
                   "query_starts has " + text(starts.size(0)) + " entries, expected " + text(op["B"] + 1));
        const KvLayout layout = layout_of(op, cache, page_size, op["K"], format);
        AttentionArgs args = query_args(op, q, out, layout.num_heads, starts, scale, causal, window, soft_cap);
        args.pages = cache.data;
        args.kv_dtype = cache.dtype;
        args.layout = layout;
        args.block_table = table.as<int32_t>();
        args.block_table_stride = table.stride(0);
        args.kv_lengths = lengths.as<int32_t>();
        require_of_inputs(Pages{op.name(), args.block_table, args.query_starts, args.kv_lengths, args.num_sequences,
                                args.block_table_stride, table.size(1), cache.size(0), page_size, window, causal});
        launch(paged_attention, args);
      },
      "q"_a, "cache"_a, "page_size"_a, "format"_a, "block_table"_a, "query_starts"_a, "kv_lengths"_a, "out"_a,
      "scale"_a, "causal"_a, "window"_a, "soft_cap"_a);

  m.def("kv_head_elements", [](int64_t page_size, int64_t head_width, int64_t format) {
    return KvLayout{page_size, 1, head_width, format_of(format)}.head_elements();
  });

  m.def("kv_store", [](nb::handle k_arg, nb::handle v_arg, nb::handle cache_arg, int64_t page_size, int64_t format,
                       nb::handle slots_arg) {
    Op op("kv_store");
    const Tensor k = op.tensor(k_arg, "k", {"T", "G", "K"}, kFloats);
    const Tensor v = op.tensor(v_arg, "v", {"T", "G", "K"}, kFloats);
    const Tensor cache = op.tensor(cache_arg, "cache", {"_", "G", "_"}, kFloats | kBytes);
    const Tensor slots = op.tensor(slots_arg, "slots", {"T"}, one_of({DType::i64}));
    op.same_dtype(k, v);
    KvStoreArgs args = {};
    args.layout = layout_of(op, cache, page_size, op["K"], format);
    args.k = op.heads(k);
    args.v = op.heads(v);
    args.pages = cache.data;
    args.kv_dtype = cache.dtype;
    args.slots = slots.as<int64_t>();
    args.num_tokens = op["T"];
    require_of_inputs(
        Slots{op.name(), slots.name, "cache", slots.data, slots.dtype, args.num_tokens, cache.size(0) * page_size});
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
                   "head width is " + text(op["K"]) + ", expected 1 to " + text(kMaxHeadWidth));
        VarlenArgs args = {};
        args.attention = query_args(op, q, out, op["G"], query_starts, scale, causal, window, soft_cap);
        require_of_inputs(
            Starts{op.name(), key_starts.name, "k", key_starts.as<int32_t>(), key_starts.size(0) - 1, op["S"]});
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
