// One level for every machine: each element goes to a place of its own, and wider registers store no faster.
#include "base/bf16.h"
#include "kernels/kv_cache/kv_cache.h"

namespace tilewright {
namespace {

template <class T, class C>
void store_head(const KvStoreArgs& args, int64_t token, int64_t head) {
  const KvLayout& layout = args.layout;
  const int64_t place = args.slots[token] % layout.page_size;
  C* base = static_cast<C*>(args.pages) + args.slots[token] / layout.page_size * layout.page_elements() +
            head * layout.head_elements();
  const T* k = static_cast<const T*>(args.k) + token * args.k_token_stride + head * args.k_head_stride;
  const T* v = static_cast<const T*>(args.v) + token * args.v_token_stride + head * args.v_head_stride;

  C* keys = base + layout.key_tile(place);
  const int column = static_cast<int>(place % kTileColumns);
  for (int64_t d = 0; d < layout.key_depth_tiles() * kTileDepth; ++d)
    assign(keys[d / kTileDepth * kTileElements + tile_offset<C>(static_cast<int>(d % kTileDepth), column)],
           d < layout.head_width ? to_float(k[d]) : 0.0f);

  C* values = base + layout.value_tile(place);
  const int depth = static_cast<int>(place % kTileDepth);
  for (int64_t d = 0; d < layout.head_width; ++d)
    assign(values[d / kTileColumns * kTileElements + tile_offset<C>(depth, static_cast<int>(d % kTileColumns))],
           to_float(v[d]));
}

template <class T, class C>
void store_tokens(const KvStoreArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (args.slots[token] < 0) continue;
    for (int64_t head = 0; head < args.layout.num_heads; ++head) store_head<T, C>(args, token, head);
  }
}

void store(const KvStoreArgs& args, int64_t begin, int64_t end) {
  const bool wide = args.kv_dtype == DType::f32;
  if (args.dtype == DType::f32)
    wide ? store_tokens<float, float>(args, begin, end) : store_tokens<float, bf16>(args, begin, end);
  else
    wide ? store_tokens<bf16, float>(args, begin, end) : store_tokens<bf16, bf16>(args, begin, end);
}

}  // namespace

extern const KvCacheKernels kv_cache_scalar;
const KvCacheKernels kv_cache_scalar = {store};

}  // namespace tilewright
