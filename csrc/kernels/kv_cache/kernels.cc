// One level for every machine: each element has its own destination, and wider registers store no faster than those of
// base/kv_tiles.h.
#include <type_traits>

#include "base/bf16.h"
#include "base/kv_bytes.h"
#include "base/kv_tiles.h"
#include "kernels/kv_cache/kv_cache.h"
#include "kernels/level.h"

namespace tilewright {
namespace {

// Returns the stored form of a value: the same bits, or converted.
template <class C, class T>
inline C stored(T value) {
  if constexpr (std::is_same_v<C, T>) {
    return value;
  } else {
    C result;
    assign(result, to_float(value));
    return result;
  }
}

template <class T, class C>
void store_head(const KvStoreArgs& args, const T* k, const T* v, C* base, int64_t place) {
  const KvLayout& layout = args.layout;
  const int64_t width = layout.head_width;

  // Pairs of dims of one token are a tile row of 32 elements apart, through all its depth tiles.
  C* key = base + layout.key_tile(place) + tile_offset<C>(0, static_cast<int>(place % kTileColumns));
  const int odd = tile_offset<C>(1, 0);
  int64_t d = 0;
  for (; d + 2 <= width; d += 2, key += 32) {
    key[0] = stored<C>(k[d]);
    key[odd] = stored<C>(k[d + 1]);
  }
  for (; d < layout.key_depth_tiles() * kTileDepth; d += 2, key += 32) {
    key[0] = d < width ? stored<C>(k[d]) : C{};
    key[odd] = C{};
  }

  // 16 dims of one token are every other element of a tile row (bf16) or half of one (fp32).
  C* value = base + layout.value_tile(place) + tile_offset<C>(static_cast<int>(place % kTileDepth), 0);
  constexpr int kStep = tile_offset<C>(0, 1);
  for (d = 0; d < width; d += kTileColumns, value += kTileElements) {
    const int columns = width - d < kTileColumns ? static_cast<int>(width - d) : kTileColumns;
    for (int c = 0; c < columns; ++c) value[c * kStep] = stored<C>(v[d + c]);
  }
}

// Whether 32 tokens from `token` on fill one whole row of value tiles, as nearly all tokens of a prompt do.
bool fills_tiles(const KvStoreArgs& args, int64_t token, int64_t end) {
  const int64_t* slots = args.slots + token;
  if (token + kTileDepth > end || slots[0] < 0 || slots[0] % kTileDepth) return false;
  for (int i = 1; i < kTileDepth; ++i)
    if (slots[i] != slots[0] + i) return false;
  return true;
}

void store_tiles(const KvStoreArgs& args, int64_t token) {
  const KvLayout& layout = args.layout;
  const int64_t place = args.slots[token] % layout.page_size;
  bf16* page = static_cast<bf16*>(args.pages) + args.slots[token] / layout.page_size * layout.page_elements();
  for (int64_t head = 0; head < layout.num_heads; ++head, page += layout.head_elements()) {
    for (int half = 0; half < kTileDepth; half += kTileColumns)
      pack_key_tiles(args.k.row<bf16>(token + half, head), args.k.token_stride, layout.head_width,
                     page + layout.key_tile(place + half));
    pack_value_tiles(args.v.row<bf16>(token, head), args.v.token_stride, layout.head_width,
                     page + layout.value_tile(place));
  }
}

template <class T, class C>
void store_tokens(const KvStoreArgs& args, int64_t begin, int64_t end) {
  const KvLayout& layout = args.layout;
  const int64_t head_elements = layout.head_elements();
  const bool whole_tiles = std::is_same_v<T, bf16> && std::is_same_v<C, bf16> && layout.head_width % kTileDepth == 0;
  for (int64_t token = begin; token < end; ++token) {
    if (whole_tiles && fills_tiles(args, token, end)) {
      store_tiles(args, token);
      token += kTileDepth - 1;
      continue;
    }
    if (args.slots[token] < 0) continue;
    const int64_t place = args.slots[token] % layout.page_size;
    C* page = static_cast<C*>(args.pages) + args.slots[token] / layout.page_size * layout.page_elements();
    for (int64_t head = 0; head < layout.num_heads; ++head)
      store_head<T, C>(args, args.k.row<T>(token, head), args.v.row<T>(token, head), page + head * head_elements,
                       place);
  }
}

template <KvFormat kFormat, class T>
void store_head_bytes(const KvLayout& layout, const T* k, const T* v, KvByte* base, int64_t place) {
  const int64_t width = layout.head_width;
  KvByte quants[kMaxHeadWidth + kTileDepth];

  const float key_scale = encode_row<kFormat>(k, width, quants);
  for (int64_t d = width; d < layout.key_depth_tiles() * kTileDepth; ++d) quants[d] = {};
  KvByte* key = base + layout.key_tile(place) + tile_offset<bf16>(0, static_cast<int>(place % kTileColumns));
  for (int64_t d = 0; d < width; d += 2, key += 32) __builtin_memcpy(key, quants + d, 2);
  for (int64_t d = round_up(width, 2); d < layout.key_depth_tiles() * kTileDepth; d += 2, key += 32)
    __builtin_memset(key, 0, 2);

  const float value_scale = encode_row<kFormat>(v, width, quants);
  KvByte* value = base + layout.value_tile(place) + tile_offset<bf16>(static_cast<int>(place % kTileDepth), 0);
  for (int64_t d = 0; d < width; d += kTileColumns, value += kTileElements) {
    const int columns = width - d < kTileColumns ? static_cast<int>(width - d) : kTileColumns;
    for (int c = 0; c < columns; ++c) value[2 * c] = quants[d + c];
  }
  __builtin_memcpy(base + layout.key_scale(place), &key_scale, sizeof(float));
  __builtin_memcpy(base + layout.value_scale(place), &value_scale, sizeof(float));
}

template <KvFormat kFormat, class T>
void store_bytes(const KvStoreArgs& args, int64_t begin, int64_t end) {
  const KvLayout& layout = args.layout;
  for (int64_t token = begin; token < end; ++token) {
    if (args.slots[token] < 0) continue;
    KvByte* page = static_cast<KvByte*>(args.pages) + args.slots[token] / layout.page_size * layout.page_elements();
    for (int64_t head = 0; head < layout.num_heads; ++head, page += layout.head_elements())
      store_head_bytes<kFormat>(layout, args.k.row<T>(token, head), args.v.row<T>(token, head), page,
                                args.slots[token] % layout.page_size);
  }
}

template <class T>
void store_as(const KvStoreArgs& args, int64_t begin, int64_t end) {
  if (args.layout.format == KvFormat::int8) return store_bytes<KvFormat::int8, T>(args, begin, end);
  if (args.layout.format == KvFormat::fp8) return store_bytes<KvFormat::fp8, T>(args, begin, end);
  args.kv_dtype == DType::f32 ? store_tokens<T, float>(args, begin, end) : store_tokens<T, bf16>(args, begin, end);
}

void store(const KvStoreArgs& args, int64_t begin, int64_t end) {
  args.k.dtype == DType::f32 ? store_as<float>(args, begin, end) : store_as<bf16>(args, begin, end);
}

}  // namespace

TILEWRIGHT_KERNELS(kv_cache, KvCacheKernels) = {store};

}  // namespace tilewright
