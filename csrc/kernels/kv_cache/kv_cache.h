// Writes new keys and values into their pages, as the tiles attention reads (base/kv_layout.h).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/kv_layout.h"
#include "base/rows.h"

namespace tilewright {

struct KvStoreArgs {
  Heads k, v;  // [T, G, K], of one type
  void* pages;
  DType kv_dtype;  // of pages whose layout has no format of its own
  KvLayout layout;
  const int64_t* slots;  // [T]: page * page_size + place in the page; negative: do not store
  int64_t num_tokens;
};

void kv_store(const KvStoreArgs& args);

struct KvCacheKernels {
  void (*store)(const KvStoreArgs& args, int64_t token_begin, int64_t token_end);
};

}  // namespace tilewright
