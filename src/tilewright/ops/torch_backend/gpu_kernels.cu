// What decoding on a GPU does too often to be several calls of torch: products of few rows, the norm and rope of heads,
// keys and values to their pages, attention over pages. bf16 in and out, fp32 within. Compiled by gpu_kernels.py when
// first needed; the headers of CUDA are not, so bf16 is bits here.
//
// Every integer argument is a long long. T tokens, H query heads, G heads of keys, K head width, B sequences.

#ifndef ROWS  // of x in `few_rows`
#define ROWS 1
#endif
#ifndef LANES  // that share a key in `decode_attention`: K / 8
#define LANES 16
#endif
#ifndef GROUP  // query heads that read one head of keys
#define GROUP 4
#endif

typedef unsigned short bf16;
typedef long long number;

constexpr int kWarps = 4;  // of every block
constexpr int kMaxWidth = 256;
constexpr float kNothing = -1e30f;  // a score below all others, of which differences are still numbers

__device__ inline float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float widened(bf16 x) { return __uint_as_float((unsigned)x << 16); }

__device__ inline bf16 rounded(float x) {
  unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40u);  // NaN stays NaN
  return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);                  // to nearest, ties to even
}

__device__ inline void widen(uint4 packed, float* x) {
  x[0] = low_half(packed.x), x[1] = high_half(packed.x);
  x[2] = low_half(packed.y), x[3] = high_half(packed.y);
  x[4] = low_half(packed.z), x[5] = high_half(packed.z);
  x[6] = low_half(packed.w), x[7] = high_half(packed.w);
}

__device__ inline float activated(float x, number activation) {
  if (activation == 1) return x / (1.0f + expf(-x));  // silu
  if (activation == 2) {                              // gelu, by tanh
    float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
  }
  if (activation == 3) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));  // gelu
  return x;
}

// out [ROWS, n] = activation(x [ROWS, k] w [n, k]^T + bias) + residual; of a gated w activation(gate) * up, where the
// rows of up follow those of gate and out has n / 2 columns. A warp computes two rows of w; k is a multiple of 8.
extern "C" __global__ void few_rows(const bf16* __restrict__ x, const bf16* __restrict__ w, const float* bias,
                                    const bf16* residual, void* out, number n, number k, number x_stride,
                                    number residual_stride, number out_stride, number has_bias, number has_residual,
                                    number is_gated, number activation, number is_wide) {
  number warp = (number)blockIdx.x * kWarps + threadIdx.x / 32, half = n / 2;
  int lane = threadIdx.x % 32;
  number first = is_gated ? warp : 2 * warp, second = is_gated ? warp + half : first + 1;
  if (first >= (is_gated ? half : n)) return;
  bool has_second = second < n;
  const uint4* a = (const uint4*)(w + first * k);
  const uint4* b = (const uint4*)(w + (has_second ? second : first) * k);
  float sums[2][ROWS];
  for (int row = 0; row < ROWS; ++row) sums[0][row] = sums[1][row] = 0.0f;
#pragma unroll 4
  for (number i = lane; i < k / 8; i += 32) {
    uint4 packed_a = a[i], packed_b = b[i];
    float wide_a[8], wide_b[8], wide_x[8];
    widen(packed_a, wide_a);
    widen(packed_b, wide_b);
    for (int row = 0; row < ROWS; ++row) {
      widen(((const uint4*)(x + row * x_stride))[i], wide_x);
      for (int j = 0; j < 8; ++j) {
        sums[0][row] += wide_a[j] * wide_x[j];
        sums[1][row] += wide_b[j] * wide_x[j];
      }
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    for (int side = 0; side < 2; ++side) {
      for (int offset = 16; offset > 0; offset /= 2)
        sums[side][row] += __shfl_xor_sync(0xffffffffu, sums[side][row], offset);
    }
  }
  if (lane != 0) return;
  for (int row = 0; row < ROWS; ++row) {
    float values[2] = {sums[0][row], sums[1][row]};
    if (has_bias) {
      values[0] += bias[first];
      if (has_second) values[1] += bias[second];
    }
    if (is_gated)
      values[0] = activated(values[0], activation) * values[1];
    else
      for (int side = 0; side < 2; ++side) values[side] = activated(values[side], activation);
    for (int side = 0; side < (is_gated || !has_second ? 1 : 2); ++side) {
      number column = first + side;
      if (has_residual) values[side] += widened(residual[row * residual_stride + column]);
      if (is_wide)
        ((float*)out)[row * out_stride + column] = values[side];
      else
        ((bf16*)out)[row * out_stride + column] = rounded(values[side]);
    }
  }
}

// The RMS norm of every head of q [T, H, K] and k [T, G, K], times a weight [K], then rope, in place: a warp has a
// head. `norm`: 0 none, 1 times the weight, 2 times 1 + the weight. cos and sin are [T, half]; the first 2 * half
// elements of a head turn, i with i + half.
extern "C" __global__ void norm_rope(bf16* q, bf16* k, const bf16* q_weight, const bf16* k_weight, const float* cos,
                                     const float* sin, number num_tokens, number q_heads, number k_heads, number width,
                                     number half, number q_stride, number q_head_stride, number k_stride,
                                     number k_head_stride, number norm, float eps) {
  __shared__ float heads[kWarps][kMaxWidth];
  number index = (number)blockIdx.x * kWarps + threadIdx.x / 32, num_heads = q_heads + k_heads;
  int lane = threadIdx.x % 32;
  if (index >= num_tokens * num_heads) return;
  number token = index / num_heads, head = index % num_heads;
  bool is_query = head < q_heads;
  bf16* x =
      is_query ? q + token * q_stride + head * q_head_stride : k + token * k_stride + (head - q_heads) * k_head_stride;
  const bf16* weight = is_query ? q_weight : k_weight;
  float* own = heads[threadIdx.x / 32];
  float squares = 0.0f;
  for (int i = lane; i < width; i += 32) {
    own[i] = widened(x[i]);
    squares += own[i] * own[i];
  }
  for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (norm) {
    float scale = rsqrtf(squares / width + eps);
    for (int i = lane; i < width; i += 32) own[i] *= scale * (widened(weight[i]) + (norm == 2 ? 1.0f : 0.0f));
  }
  __syncwarp();
  for (int i = lane; i < half; i += 32) {
    float c = cos[token * half + i], s = sin[token * half + i], a = own[i], b = own[i + half];
    x[i] = rounded(a * c - b * s);
    x[i + half] = rounded(b * c + a * s);
  }
  for (int i = 2 * half + lane; i < width; i += 32) x[i] = rounded(own[i]);
}

// Keys and values of a token, `width` elements each, to the row `slots[token]` of their pages; a negative slot is the
// last row, which is nobody's. A block has a token; the width is a multiple of 8.
extern "C" __global__ void store_rows(const bf16* k, const bf16* v, bf16* keys, bf16* values, const number* slots,
                                      number num_rows, number width, number k_stride, number v_stride) {
  number token = blockIdx.x, slot = slots[token];
  if (slot < 0) slot = num_rows - 1;
  const uint4* from_k = (const uint4*)(k + token * k_stride);
  const uint4* from_v = (const uint4*)(v + token * v_stride);
  uint4* to_k = (uint4*)(keys + slot * width);
  uint4* to_v = (uint4*)(values + slot * width);
  for (number i = threadIdx.x; i < width / 8; i += blockDim.x) {
    to_k[i] = from_k[i];
    to_v[i] = from_v[i];
  }
}

// Attention of one query per sequence, q [B, H, K], over pages [pages, page_size, G, K]: the last kv_lengths[b] - first
// keys, where `window` > 0 leaves out those before first. Block (b * G + g, s) has the part s of the keys of a sequence
// for the GROUP query heads of a head of keys; LANES lanes share a key. With one part `out` [B, H, K] is written, else
// `partial` [B, H, parts, K + 2]: sums that are not divided yet, the largest score, and the sum of weights.
extern "C" __global__ void decode_attention(const bf16* q, const bf16* keys, const bf16* values, const int* table,
                                            const int* kv_lengths, bf16* out, float* partial, number kv_heads,
                                            number page_size, number table_stride, number q_stride,
                                            number q_head_stride, number window, float scale) {
  constexpr int kWidth = LANES * 8, kAtOnce = 32 / LANES, kSets = kWarps * kAtOnce;
  __shared__ float sums[kSets][GROUP][kWidth];
  __shared__ float maxima[kSets][GROUP], weights[kSets][GROUP];
  number sequence = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads, num_parts = gridDim.y;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = (lane % LANES) * 8,
      set = warp * kAtOnce + lane / LANES;
  number length = kv_lengths[sequence];
  number start = window > 0 && length > window ? length - window : 0;
  number per_part = (length - start + num_parts - 1) / num_parts;
  number begin = start + blockIdx.y * per_part, end = begin + per_part < length ? begin + per_part : length;
  float queries[GROUP][8], total[GROUP][8], largest[GROUP], weight[GROUP];
  for (int head = 0; head < GROUP; ++head) {
    const bf16* own = q + sequence * q_stride + (kv_head * GROUP + head) * q_head_stride + column;
    widen(*(const uint4*)own, queries[head]);
    largest[head] = kNothing;
    weight[head] = 0.0f;
    for (int j = 0; j < 8; ++j) queries[head][j] *= scale, total[head][j] = 0.0f;
  }
  for (number first = begin + warp * kAtOnce; first < end; first += kSets) {
    number key = first + lane / LANES;
    bool is_key = key < end;
    number own = is_key ? key : first;
    number row = (number)table[sequence * table_stride + own / page_size] * page_size + own % page_size;
    number place = (row * kv_heads + kv_head) * kWidth + column;
    float wide_k[8], wide_v[8];
    widen(*(const uint4*)(keys + place), wide_k);
    widen(*(const uint4*)(values + place), wide_v);
    for (int head = 0; head < GROUP; ++head) {
      float score = 0.0f;
      for (int j = 0; j < 8; ++j) score += queries[head][j] * wide_k[j];
      for (int offset = LANES / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
      if (!is_key) continue;
      float now = score > largest[head] ? score : largest[head];
      float before = expf(largest[head] - now), share = expf(score - now);
      if (score != score) before = share = score;  // NaN: its sequence shows it
      largest[head] = now;
      weight[head] = weight[head] * before + share;
      for (int j = 0; j < 8; ++j) total[head][j] = total[head][j] * before + share * wide_v[j];
    }
  }
  for (int head = 0; head < GROUP; ++head) {
    for (int j = 0; j < 8; ++j) sums[set][head][column + j] = total[head][j];
    if (column == 0) maxima[set][head] = largest[head], weights[set][head] = weight[head];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * kWidth; i += blockDim.x) {
    int head = i / kWidth, element = i % kWidth;
    float most = kNothing, sum = 0.0f, all = 0.0f;
    for (int other = 0; other < kSets; ++other) most = maxima[other][head] > most ? maxima[other][head] : most;
    for (int other = 0; other < kSets; ++other) {
      float share = expf(maxima[other][head] - most);
      sum += share * sums[other][head][element];
      all += share * weights[other][head];
    }
    number row = sequence * kv_heads * GROUP + kv_head * GROUP + head;
    if (num_parts == 1) {
      out[row * kWidth + element] = rounded(all == 0.0f ? 0.0f : sum / all);
    } else {
      float* own = partial + (row * num_parts + blockIdx.y) * (kWidth + 2);
      own[element] = sum;
      if (element == 0) own[kWidth] = most, own[kWidth + 1] = all;
    }
  }
}

// out [B * H, width] of the parts that `decode_attention` left; a block has a row of it.
extern "C" __global__ void join_parts(const float* partial, bf16* out, number num_parts, number width) {
  const float* own = partial + blockIdx.x * num_parts * (width + 2);
  float most = kNothing, all = 0.0f;
  for (number part = 0; part < num_parts; ++part) {
    float largest = own[part * (width + 2) + width];
    most = largest > most ? largest : most;
  }
  for (number part = 0; part < num_parts; ++part)
    all += expf(own[part * (width + 2) + width] - most) * own[part * (width + 2) + width + 1];
  for (number i = threadIdx.x; i < width; i += blockDim.x) {
    float sum = 0.0f;
    for (number part = 0; part < num_parts; ++part)
      sum += expf(own[part * (width + 2) + width] - most) * own[part * (width + 2) + i];
    out[blockIdx.x * width + i] = rounded(all == 0.0f ? 0.0f : sum / all);
  }
}
