// Writes new keys and values into their pages, as the tiles attention reads (base/kv_layout.h).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/kv_layout.h"

namespace tilewright {

struct KvStoreArgs {
  const void *k, *v;  // [T, G, K]
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  DType dtype;
  void* pages;
  DType kv_dtype;
  KvLayout layout;
  const int64_t* slots;  // [T]: page * page_size + place in the page; negative: do not store
  int64_t num_tokens;
};

void kv_store(const KvStoreArgs& args);

struct KvCacheKernels {
  void (*store)(const KvStoreArgs& args, int64_t token_begin, int64_t token_end);
};

}  // namespace tilewright
