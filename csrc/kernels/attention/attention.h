// Attention over keys and values in pages (base/kv_layout.h): softmax(scale Q K^T + mask) V, fp32 softmax.
//
// One kernel for every use. A sequence has q_len query tokens and kv_len keys; query i stands at position
// kv_len - q_len + i. Prefill chunks and decode steps read a paged cache through a block table; variable-length
// attention lays its own keys and values out in pages first. Query heads that share a kv head (GQA) are rows of one
// product: row r of a sequence is token r / group, head r % group of the kv head.
//
//   causal    a query sees keys up to its position
//   window    > 0: only keys at a distance under `window` (to both sides when not causal)
//   soft_cap  > 0: scores become cap * tanh(score / cap) before the mask
//   mask      variable-length only: bool (true = see) or additive, [B or 1, H or 1, Sq or 1, Sk]
//
// Keys are processed in blocks of kKeyBlock at fixed places. A block gives a partial (maximum, sum, output), and
// partials are merged in order: a decode step split over threads gives the same bits as one thread, and as a prefill.
//
// Keys and values in 8 bits (base/kv_bytes.h) become tiles of bf16 in the cache, a few at a time, right before they are
// multiplied: the result has the bits of a bf16 cache with the decoded values.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/kv_layout.h"
#include "base/rows.h"

namespace tilewright {

inline constexpr int kKeyBlock = 512;
inline constexpr int kQueryRows = 32;

struct AttentionMask {
  const void* data = nullptr;
  DType dtype = DType::boolean;
  int64_t sequence_stride = 0, head_stride = 0, query_stride = 0;  // in elements, 0 where broadcast
};

// Factors of keys and values stored in fp16.
struct HeadScales {
  float keys = 1.0f, values = 1.0f;
};

struct AttentionArgs {
  Heads q, out;  // [T, H, K], of one type
  const void* pages;
  DType kv_dtype;                           // of pages whose layout has no 8-bit format
  const HeadScales* head_scales = nullptr;  // [B, kv heads] of pages in fp16, which only varlen_attention makes
  KvLayout layout;
  const int32_t* block_table;  // [B, pages per sequence]
  int64_t block_table_stride;
  const int32_t* query_starts;  // [B + 1]
  const int32_t* kv_lengths;    // [B]
  int64_t num_sequences;
  int64_t num_heads;  // query heads
  bool causal;
  int64_t window;
  float scale, soft_cap;
  AttentionMask mask;

  TILEWRIGHT_INLINE int64_t group() const { return num_heads / layout.num_heads; }
  TILEWRIGHT_INLINE HeadScales scales(int64_t sequence, int64_t head) const {
    return head_scales ? head_scales[sequence * layout.num_heads + head] : HeadScales{};
  }
};

void paged_attention(const AttentionArgs& args);

// Variable-length attention: keys and values are packed like q, and pages are made on the way, in fp16 if a level
// multiplies that faster than bf16. A paged cache is not converted: a decode step would have to convert all that it
// reads, and a prefill gives the same bits.
struct VarlenArgs {
  AttentionArgs attention;    // pages, block_table, kv_lengths are filled in by the kernel; layout.page_size too
  Heads k, v;                 // [T, G, K]
  const int32_t* key_starts;  // [B + 1]
};

void varlen_attention(const VarlenArgs& args);

// Tokens that become tiles together: 32 of one sequence, or fewer at its end.
struct TokenPiece {
  int64_t sequence, token, count;  // token: of all sequences
  int64_t page, in_page;           // their destination
};

// A unit of work: some rows of one sequence against some blocks of one kv head.
struct AttentionItem {
  int32_t sequence, head;
  int32_t row_begin, rows;
  int32_t block_begin, block_end;
  float* partials;  // one per block if the keys of these rows are split among items, else null: finish here
};

TILEWRIGHT_INLINE constexpr int64_t partial_floats(int64_t rows, const KvLayout& layout) {
  return rows * (layout.value_column_tiles() * kTileColumns + 2);
}

// Items of one sequence and head that a thread may process together: keys and values of 6,432 patches are 1.6 MB a
// head, and four items share each block of them on its way from beyond L2. Eight gain no more.
inline constexpr int kItemsAtOnce = 4;

struct AttentionKernels {
  const char* product;  // of bf16 keys and values, for the kernel's name (base/product_name.h)
  // Runs up to kItemsAtOnce items of one sequence and head, of kQueryRows rows each if more than one.
  void (*run)(const AttentionArgs& args, const AttentionItem* items, int count);
  // Merges the partials of blocks [block_begin, block_end) and writes the rows.
  void (*merge)(const AttentionArgs& args, const AttentionItem& item);
  // Packs tokens of one head as tiles, padded with zeros.
  void (*pack_keys)(const VarlenArgs& args, const TokenPiece& piece, int64_t head, void* tiles);
  void (*pack_values)(const VarlenArgs& args, const TokenPiece& piece, int64_t head, void* tiles);
  // Returns the scales of a head whose tiles are fp16; null: tiles have the type of the keys and values.
  HeadScales (*scale_head)(const VarlenArgs& args, int64_t sequence, int64_t head) = nullptr;
};

}  // namespace tilewright
