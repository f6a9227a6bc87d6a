// Operations that decoding on a GPU runs too often for several calls of torch each: products of few rows, norms, the
// norm and rope of heads, storing keys and values in pages, attention over pages. bf16 in and out, fp32 inside.
// Compiled on first use by gpu_kernels.py, without CUDA's headers, so bf16 is bits here.
//
// A kernel starts while the one before it still runs, and waits for its results with `after_previous`. Before that it
// reads only weights, which no kernel writes. Every kernel waits, so that all earlier ones are done too.
//
// Every integer argument is a long long. T tokens, H query heads, G heads of keys, K head width, B sequences.

#ifndef ROWS  // of x in `few_rows`
#define ROWS 1
#endif
#ifndef LANES  // lanes that share a key in `decode_attention`: K / 8
#define LANES 16
#endif
#ifndef GROUP  // query heads that read one kv head
#define GROUP 4
#endif

typedef unsigned short bf16;
typedef long long number;

constexpr int kWarps = 4;      // of every block except those of `rms_norm`
constexpr int kBlockRows = 4;  // rows of w per block of `few_rows`
constexpr int kMaxWidth = 256;
constexpr float kNothing = -1e30f;  // a score below all others, whose differences are finite

// Lets the next kernel start and run up to its wait.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the results of all earlier kernels are visible.
__device__ inline void after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads eight elements of a weight, which is read once: they do not evict reused data from the nearest cache.
__device__ inline uint4 read_once(const uint4* from) {
#ifdef __CUDA_ARCH__
  uint4 packed;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packed.x), "=r"(packed.y), "=r"(packed.z), "=r"(packed.w)
               : "l"(from));
  return packed;
#else
  return *from;
#endif
}

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

// out [ROWS, n] = activation(x [ROWS, k] w [n, k]^T + bias) + residual; for a gated w activation(gate) * up, where the
// rows of up follow those of gate and out has n / 2 columns. A block has kBlockRows rows of w, in pairs of gate and up
// if it is gated, and its threads split their columns: long pieces of few rows are read faster from memory than short
// pieces of many. k is a multiple of 8.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    few_rows(const bf16* x, const bf16* w, const float* bias, const bf16* residual, void* out, number n, number k,
             number x_stride, number residual_stride, number out_stride, number has_bias, number has_residual,
             number is_gated, number activation, number is_wide) {
  __shared__ float parts[kWarps][kBlockRows][ROWS];
  let_next_start();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_loads = (int)(k / 8), load = threadIdx.x;
  number num_columns = is_gated ? n / 2 : n;
  int block_columns = is_gated ? kBlockRows / 2 : kBlockRows;
  const uint4* rows[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    number column = (number)blockIdx.x * block_columns + (is_gated ? i / 2 : i);
    if (column >= num_columns) column = 0;
    rows[i] = (const uint4*)(w + (is_gated && i % 2 ? column + num_columns : column) * k);
  }
  uint4 next[kBlockRows];  // in flight while the previous loads are summed
  if (load < num_loads) {
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) next[i] = read_once(rows[i] + load);
  }
  after_previous();
  float sums[kBlockRows][ROWS];
  for (int i = 0; i < kBlockRows; ++i)
    for (int row = 0; row < ROWS; ++row) sums[i][row] = 0.0f;
  for (; load < num_loads; load += 32 * kWarps) {
    uint4 now[kBlockRows];
    int later = load + 32 * kWarps;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      now[i] = next[i];
      if (later < num_loads) next[i] = read_once(rows[i] + later);
    }
    for (int row = 0; row < ROWS; ++row) {
      float wide_x[8], wide_w[8];
      widen(*(const uint4*)(x + row * x_stride + 8 * load), wide_x);
      for (int i = 0; i < kBlockRows; ++i) {
        widen(now[i], wide_w);
        for (int j = 0; j < 8; ++j) sums[i][row] += wide_w[j] * wide_x[j];
      }
    }
  }
  for (int i = 0; i < kBlockRows; ++i) {
    for (int row = 0; row < ROWS; ++row) {
      for (int offset = 16; offset > 0; offset /= 2) sums[i][row] += __shfl_xor_sync(0xffffffffu, sums[i][row], offset);
      if (lane == 0) parts[warp][i][row] = sums[i][row];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < block_columns * ROWS; i += 32 * kWarps) {
    int row = i / block_columns, own = i % block_columns;
    number column = (number)blockIdx.x * block_columns + own;
    if (column >= num_columns) continue;
    float value = has_bias ? bias[column] : 0.0f, up = is_gated && has_bias ? bias[column + num_columns] : 0.0f;
    for (int from = 0; from < kWarps; ++from) {
      value += parts[from][is_gated ? 2 * own : own][row];
      if (is_gated) up += parts[from][2 * own + 1][row];
    }
    value = activated(value, activation);
    if (is_gated) value *= up;
    if (has_residual) value += widened(residual[row * residual_stride + column]);
    if (is_wide)
      ((float*)out)[row * out_stride + column] = value;
    else
      ((bf16*)out)[row * out_stride + column] = rounded(value);
  }
}

// out [T, width] = the RMS norm of x times the weight, or 1 + weight if `plus_one`. A block of up to 32 warps computes
// a row; the width is a multiple of 8.
extern "C" __global__ void rms_norm(const bf16* x, const bf16* weight, bf16* out, number width, number x_stride,
                                    number out_stride, number plus_one, float eps) {
  __shared__ float squares[32];
  let_next_start();
  after_previous();
  const uint4* from = (const uint4*)(x + blockIdx.x * x_stride);
  float wide[8], wide_weight[8], sum = 0.0f;
  for (number i = threadIdx.x; i < width / 8; i += blockDim.x) {
    widen(from[i], wide);
    for (int j = 0; j < 8; ++j) sum += wide[j] * wide[j];
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  float all = 0.0f;
  for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) all += squares[warp];
  float scale = rsqrtf(all / width + eps), added = plus_one ? 1.0f : 0.0f;
  for (number i = threadIdx.x; i < width / 8; i += blockDim.x) {
    widen(from[i], wide);
    widen(((const uint4*)weight)[i], wide_weight);
    bf16* to = out + blockIdx.x * out_stride + 8 * i;
    for (int j = 0; j < 8; ++j) to[j] = rounded(wide[j] * scale * (wide_weight[j] + added));
  }
}

// RMS-norms every head of q [T, H, K] and k [T, G, K], times a weight [K], then rotates it, in place, a warp per head.
// `norm`: 0 none, 1 times the weight, 2 times 1 + the weight. cos and sin are [T, half]; the first 2 * half elements of
// a head are rotated, i with i + half.
extern "C" __global__ void norm_rope(bf16* q, bf16* k, const bf16* q_weight, const bf16* k_weight, const float* cos,
                                     const float* sin, number num_tokens, number q_heads, number k_heads, number width,
                                     number half, number q_stride, number q_head_stride, number k_stride,
                                     number k_head_stride, number norm, float eps) {
  let_next_start();
  after_previous();
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

// Stores keys and values of a token, `width` elements each, in row `slots[token]` of their pages; for a negative slot
// in the last row, which is unused. A block stores a token; the width is a multiple of 8.
extern "C" __global__ void store_rows(const bf16* k, const bf16* v, bf16* keys, bf16* values, const number* slots,
                                      number num_rows, number width, number k_stride, number v_stride) {
  let_next_start();
  after_previous();
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
// keys, where `window` > 0 excludes those before first. Block (b * G + g, s) computes part s of the keys of a sequence
// for the GROUP query heads of a kv head; LANES lanes share a key. With one part `out` [B, H, K] is written, else
// `partial` [B, H, parts, K + 2]: undivided sums, the largest score, and the sum of weights.
extern "C" __global__ void decode_attention(const bf16* q, const bf16* keys, const bf16* values, const int* table,
                                            const int* kv_lengths, bf16* out, float* partial, number kv_heads,
                                            number page_size, number table_stride, number q_stride,
                                            number q_head_stride, number window, float scale) {
  let_next_start();
  after_previous();
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
      if (score != score) before = share = score;  // NaN: its sequence's result is NaN
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

// out [B * H, width] = the merged parts of `decode_attention`; a block computes a row.
extern "C" __global__ void join_parts(const float* partial, bf16* out, number num_parts, number width) {
  let_next_start();
  after_previous();
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
