// The gated delta rule in chunks of tokens; formulas in gated_delta.h. Include after a Vec and a Matrix, which defines
// the products: VectorMatrix or TileMatrix.
//
// A state is processed in strips of 32 columns, 32 rows at a time. A product's result is 4 KB, which a vector pass
// reads from L1 and turns into tiles for the next product. Interleaving passes with products, tile by tile, gained
// nothing: the core's out-of-order window is large enough. q and k enter the products unchanged; ChunkFactors normalise
// their lengths.
#pragma once

#include "base/arch.h"
#include "base/scratch.h"
#include "kernels/gated_delta/inverse.h"
#include "kernels/gated_delta/right.h"
#include "kernels/gated_delta/step.h"

namespace tilewright {
namespace {

// One number per token of a chunk, zero for padding tokens.
struct ChunkFactors {
  float k[kChunkTokens], q[kChunkTokens];  // to length 1, q scaled
  float beta[kChunkTokens];
  float since[kChunkTokens], since_rest[kChunkTokens];  // g summed since the start of the chunk, in two parts
  float decay[kChunkTokens];                            // exp(since)
  // Factors of a token's rows:
  float read[kChunkTokens];   // -beta decay k: of k S, to be subtracted from beta v
  float query[kChunkTokens];  // decay q: of q S
  float left[kChunkTokens];   // k times the decay from the token to the end of the chunk: of U, to be added to S
};

template <class Matrix, class T>
class Chunks {
  using E = typename Matrix::Element;
  static constexpr int kParts = Matrix::kParts;            // of all computed values
  static constexpr int kInputParts = Matrix::kInputParts;  // of q and k
  static constexpr int64_t kSquare = kChunkTokens * kChunkTokens;
  static constexpr int kBlockRows = kTileDepth;  // rows of a product, as many as a tile is deep
  static constexpr int64_t kBlock = kBlockRows * kStripColumns;

 public:
  Chunks(const GatedDeltaArgs& args, const DeltaItem& item)
      : args_(args),
        item_(item),
        key_head_(item.head_begin / args.group()),
        depth_(round_up(args.key_width, kTileDepth)),
        depth_tiles_(depth_ / kTileDepth),
        num_strips_(ceil_div(item.column_end - item.column_begin, kStripColumns)) {
    place(nullptr);
    place(static_cast<char*>(thread_scratch(size_bytes_)));
    // Elements above the diagonal blocks are read as zero and never written.
    __builtin_memset(solver_, 0, kParts * kSquare * sizeof(E));
    __builtin_memset(weights_, 0, kParts * kSquare * sizeof(E));
  }

  void run() {
    const FlushDenormals flush;
    load_states();
    const int64_t end = args_.sequences.starts[item_.sequence + 1];
    for (int64_t begin = args_.sequences.starts[item_.sequence]; begin < end; begin = token_end_) {
      begin_chunk(begin, end);
      for (int64_t head = item_.head_begin; head < item_.head_end; ++head) run_head(head);
      const int64_t slot = args_.sequences.write_slot(item_.sequence, token_end_ - 1);
      if (slot >= 0) store_states(slot);
    }
  }

 private:
  // Assigns the scratch memory; the first time, without any, only computes its size.
  void place(char* base) {
    size_bytes_ = 0;
    auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(reinterpret_cast<uintptr_t>(base) +
                                                                             static_cast<uintptr_t>(size_bytes_));
      size_bytes_ += round_up(count * static_cast<int64_t>(sizeof(*pointer)), 64);
    };
    take(rows_, kInputParts * rows_stride());
    take(columns_, kInputParts * depth_ * kChunkTokens);
    take(key_tiles_, kInputParts * depth_ * kChunkTokens);
    take(scores_, 2 * 2 * kChunkTokens * kStripColumns);
    take(lower_, kSquare);
    take(inverse_, kParts > 1 ? kSquare : 0);
    take(solver_, kParts * kSquare);
    take(weights_, kParts * kSquare);
    take(reads_, 2 * kBlock);
    take(added_, kBlock);
    take(right_tiles_, kParts * kChunkTokens * kStripColumns);
    take(added_tiles_, kParts * kChunkTokens * kStripColumns);
    take(left_tiles_, kParts * kChunkTokens * kStripColumns);
    const int64_t num_strips = (item_.head_end - item_.head_begin) * num_strips_;
    take(states_, num_strips * depth_ * kStripColumns);
    take(state_tiles_, num_strips * kParts * depth_ * kStripColumns);
  }

  int64_t rows_stride() const { return 2 * kChunkTokens * depth_; }  // from part to part

  int64_t strip_offset(int64_t head, int64_t strip) const {
    return ((head - item_.head_begin) * num_strips_ + strip) * depth_ * kStripColumns;
  }
  float* strip_of(int64_t head, int64_t strip) const { return states_ + strip_offset(head, strip); }
  Right<E> tiles_of(int64_t head, int64_t strip) const {
    return Right<E>::of_strip(state_tiles_ + kParts * strip_offset(head, strip), depth_tiles_);
  }

  // fn(strip, row of the strip, offset of that row in the head's state, its number of columns) for each row of each
  // strip.
  template <class Fn>
  void for_each_row(int64_t head, Fn fn) {
    for (int64_t s = 0; s < num_strips_; ++s) {
      const int64_t column = item_.column_begin + s * kStripColumns, left = item_.column_end - column;
      for (int64_t d = 0; d < depth_; ++d)
        fn(strip_of(head, s) + d * kStripColumns, d, d * args_.value_width + column,
           left < kStripColumns ? left : kStripColumns);
    }
  }

  void load_states() {
    const int64_t slot = args_.sequences.read_slots[item_.sequence];
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      const float* state = args_.state(slot, head);
      for_each_row(head, [&](float* row, int64_t d, int64_t offset, int64_t count) {
        __builtin_memset(row, 0, kStripColumns * sizeof(float));
        if (state && d < args_.key_width) __builtin_memcpy(row, state + offset, count * sizeof(float));
      });
      for (int64_t strip = 0; strip < num_strips_; ++strip) pack_state(strip_of(head, strip), tiles_of(head, strip));
    }
  }

  void store_states(int64_t slot) {
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      float* state = args_.state(slot, head);
      for_each_row(head, [&](const float* row, int64_t d, int64_t offset, int64_t count) {
        if (d < args_.key_width) __builtin_memcpy(state + offset, row, count * sizeof(float));
      });
    }
  }

  // A chunk ends where the sequence does or where a state is kept. Rows are padded to whole strips.
  void begin_chunk(int64_t begin, int64_t end) {
    token_begin_ = begin;
    if (end > begin + kChunkTokens) end = begin + kChunkTokens;
    for (token_end_ = begin + 1; token_end_ < end; ++token_end_)
      if (args_.sequences.write_slot(item_.sequence, token_end_ - 1) >= 0) break;
    count_ = static_cast<int>(token_end_ - begin);
    padded_ = static_cast<int>(round_up(count_, kStripColumns));

    const T* k = args_.k.row<T>(begin, key_head_);
    const T* q = args_.q.row<T>(begin, key_head_);
    load_rows(k, args_.k.token_stride, rows_, factors_.k);
    load_rows(q, args_.q.token_stride, rows_ + padded_ * depth_, factors_.q);
    for (int i = 0; i < padded_; ++i) factors_.q[i] *= args_.scale;
    for (int part = 0; part < kInputParts; ++part)
      Matrix::transpose(rows_ + part * rows_stride(), padded_, depth_, key_tiles_ + part * depth_ * kChunkTokens,
                        columns_ + part * depth_ * kChunkTokens);
    // Tokens before a strip of keys do not see it.
    for (int row = 0; row < 2 * padded_; row += kBlockRows)
      for (int first = 0; first <= row % padded_; first += kStripColumns) {
        const Right<E> keys = {key_tiles_ + first * depth_, kTileElements, depth_ * kTileColumns,
                               depth_ * kChunkTokens};
        matrix_.template multiply<kInputParts, kInputParts>(
            rows_ + row * depth_, depth_, rows_stride(), keys, depth_tiles_,
            scores_ + (first / kStripColumns * 2 * kChunkTokens + row) * kStripColumns, fetches_);
      }
  }

  // Loads the chunk's rows of q or k, padded with zeros, and the factors that normalise their length.
  void load_rows(const T* row, int64_t stride, E* rows, float* factors) {
    for (int i = 0; i < count_; ++i, row += stride)
      factors[i] = Matrix::copy_row(row, args_.key_width, depth_, rows + i * depth_, rows_stride());
    for (int i = 0; i < count_; ++i) factors[i] = unit_factor(args_, factors[i]);
    for (int i = count_; i < padded_; ++i) factors[i] = 0.0f;
    for (int part = 0; part < kInputParts; ++part)
      __builtin_memset(rows + part * rows_stride() + count_ * depth_, 0,
                       static_cast<size_t>((padded_ - count_) * depth_) * sizeof(E));
  }

  void load_gates(int64_t head) {
    double since = 0;
    for (int i = 0; i < padded_; ++i) {
      const int64_t token = token_begin_ + i;
      if (i < count_) since += args_.g.row<float>(token)[head];
      factors_.beta[i] = i < count_ ? args_.beta.row<float>(token)[head] : 0.0f;
      factors_.since[i] = static_cast<float>(since);
      factors_.since_rest[i] = static_cast<float>(since - factors_.since[i]);
    }
    const Vec last = Vec::set1(factors_.since[padded_ - 1]), last_rest = Vec::set1(factors_.since_rest[padded_ - 1]);
    for (int i = 0; i < padded_; i += Vec::kLanes) {
      const Vec sum = Vec::load(factors_.since + i), rest = Vec::load(factors_.since_rest + i);
      const Vec decay = exp(sum + rest), k = Vec::load(factors_.k + i);
      decay.store(factors_.decay + i);
      (Vec::zero() - Vec::load(factors_.beta + i) * decay * k).store(factors_.read + i);
      (decay * Vec::load(factors_.q + i)).store(factors_.query + i);
      (exp((last - sum) + (last_rest - rest)) * k).store(factors_.left + i);
    }
  }

  // Decay from token j to token i, for one i: e^(difference), never a quotient, so that no exponential underflows.
  Vec decay_since(int j, Vec sum, Vec rest) const {
    const Vec between = (sum - Vec::load(factors_.since + j)) + (rest - Vec::load(factors_.since_rest + j));
    return exp(min(between, Vec::zero()));
  }

  // Stores one Vec of a row of -L and of P: scores times the factors of the row and of the columns. The first `below`
  // lanes are below the diagonal.
  void put_square(int i, int j, Vec k_factor, Vec q_factor, Vec weight, int below) {
    const float* score = scores_ + j / kStripColumns * 2 * kChunkTokens * kStripColumns + j % kStripColumns;
    Vec lower = Vec::load(score + i * kStripColumns) * (k_factor * weight);
    Vec attention = Vec::load(score + (padded_ + i) * kStripColumns) * (q_factor * weight);
    if (below < Vec::kLanes) {
      lower = keep_lanes(lower, 0, below, Vec::zero());
      attention = keep_lanes(attention, 0, below + 1, Vec::zero());
    }
    lower.store(lower_ + i * kChunkTokens + j);
    Matrix::store_left(weights_ + i * kChunkTokens + j, kSquare, attention);
  }

  // Computes P and the inverse. Between blocks of 16 tokens a decay is that up to the later block times that within it:
  // an exponential per column and one per row instead of one per pair.
  void make_square(int64_t head) {
    load_gates(head);
    alignas(64) float columns[kChunkTokens], rows[kInverseBlock];
    for (int first = 0; first < padded_; first += kInverseBlock) {
      if (first) {
        const Vec sum = Vec::set1(factors_.since[first - 1]), rest = Vec::set1(factors_.since_rest[first - 1]);
        for (int j = 0; j < first; j += Vec::kLanes)
          (decay_since(j, sum, rest) * Vec::load(factors_.k + j)).store(columns + j);
        for (int r = 0; r < kInverseBlock; r += Vec::kLanes)
          exp((Vec::load(factors_.since + first + r) - sum) + (Vec::load(factors_.since_rest + first + r) - rest))
              .store(rows + r);
      }
      for (int i = first; i < first + kInverseBlock; ++i) {
        const float k_factor = -factors_.beta[i] * factors_.k[i], q_factor = factors_.q[i];
        if (first) {
          const Vec k_row = Vec::set1(k_factor * rows[i - first]), q_row = Vec::set1(q_factor * rows[i - first]);
          for (int j = 0; j < first; j += Vec::kLanes)
            put_square(i, j, k_row, q_row, Vec::load(columns + j), Vec::kLanes);
        }
        const Vec sum = Vec::set1(factors_.since[i]), rest = Vec::set1(factors_.since_rest[i]);
        for (int j = first; j < first + kInverseBlock; j += Vec::kLanes)
          put_square(i, j, Vec::set1(k_factor), Vec::set1(q_factor),
                     decay_since(j, sum, rest) * Vec::load(factors_.k + j), i - j);
      }
    }
    auto put = [this](int i, int j, Vec v) { Matrix::store_left(solver_ + i * kChunkTokens + j, kSquare, v); };
    if constexpr (kParts > 1)
      invert_unit_lower(lower_, inverse_, kChunkTokens, padded_, put);
    else
      invert_unit_lower(lower_, solver_, kChunkTokens, padded_, [](int, int, Vec) {});
  }

  // fn(row, column, place, lane) for each Vec of each pair of 32 rows of a strip: `place` is the pair's row in `tiles`,
  // `lane` its column there.
  template <class Fn>
  static void over_pairs(E* tiles, Fn fn) {
    for (int row = 0; row < kTileDepth; row += 2, tiles += 2 * kTileColumns)
#pragma GCC unroll 2
      for (int column = 0; column < kStripColumns; column += kTileColumns)
        for (int lane = 0; lane < kTileColumns; lane += Vec::kLanes)
          fn(row, column + lane, tiles + column / kTileColumns * kTileElements, lane);
  }

  // Plans prefetches of the next chunk's rows: v of this head and, once, q and k.
  void plan_fetches(int64_t head) {
    const int64_t left = args_.sequences.starts[item_.sequence + 1] - token_end_;
    const int64_t rows = left < kChunkTokens ? left : kChunkTokens;
    auto plan = [&](const Heads& rows, int64_t head, int64_t column, int64_t width, int64_t num_rows) {
      const T* row = rows.row<T>(token_end_, head) + column;
      const int64_t element = static_cast<int64_t>(sizeof(T));
      return RowPrefetch{reinterpret_cast<const char*>(row), rows.token_stride * element, width * element, num_rows};
    };
    const int64_t key_rows = head == item_.head_begin ? rows : 0;
    fetches_ = {{plan(args_.v, head, item_.column_begin, item_.column_end - item_.column_begin, rows),
                 plan(args_.k, key_head_, 0, args_.key_width, key_rows),
                 plan(args_.q, key_head_, 0, args_.key_width, key_rows)}};
  }

  void run_head(int64_t head) {
    plan_fetches(head);
    make_square(head);
    for (int64_t strip = 0; strip < num_strips_; ++strip) run_strip(head, strip);
  }

  Right<E> token_tiles(E* data) const { return Right<E>::of_strip(data, kChunkTokens / kTileDepth); }

  void run_strip(int64_t head, int64_t strip) {
    const int64_t column = item_.column_begin + strip * kStripColumns;
    const Right<E> tiles = tiles_of(head, strip);
    float* q_reads = reads_ + kBlock;
    auto read = [&](const E* rows, float* product) {
      matrix_.template multiply<kInputParts, kParts>(rows, depth_, rows_stride(), tiles, depth_tiles_, product,
                                                     fetches_);
    };
    // Lower triangular: 32 rows reach no deeper than their own end.
    auto combine = [&](const E* square, int row, E* data, float* product) {
      matrix_.template multiply<kParts, kParts>(square + row * kChunkTokens, kChunkTokens, kSquare, token_tiles(data),
                                                row / kBlockRows + 1, product, fetches_);
    };
    for (int row = 0; row < padded_; row += kBlockRows) {
      read(rows_ + row * depth_, reads_);
      if (item_.column_end - column >= kStripColumns)
        make_right_side<true>(head, column, row);
      else
        make_right_side<false>(head, column, row);
      combine(solver_, row, right_tiles_, added_);
      pack_added(row);
      read(rows_ + (padded_ + row) * depth_, q_reads);
      combine(weights_, row, added_tiles_, reads_);
      store_outputs(head, column, row);
    }
    for (int64_t d = 0; d < depth_; d += kBlockRows) {
      matrix_.template multiply<kInputParts, kParts>(columns_ + d * kChunkTokens, kChunkTokens, depth_ * kChunkTokens,
                                                     token_tiles(left_tiles_), padded_ / kTileDepth, added_, fetches_);
      add_to_state(strip_of(head, strip) + d * kStripColumns, tiles.tile(d / kTileDepth, 0), tiles.part_stride, added_);
    }
  }

  // Packs a strip of a state as tiles.
  void pack_state(const float* state, const Right<E>& tiles) {
    for (int64_t tile = 0; tile < depth_tiles_; ++tile, state += kBlock)
      over_pairs(tiles.tile(tile, 0), [&](int d, int c, E* place, int lane) {
        const float* row = state + d * kStripColumns + c;
        Matrix::store_right(place, tiles.part_stride, lane, Vec::load(row), Vec::load(row + kStripColumns));
      });
  }

  // Decays 32 rows of a state to the end of the chunk, adds the chunk's contribution, and packs the sum as tiles.
  void add_to_state(float* state, E* tiles, int64_t part_stride, const float* added) {
    const Vec decay = Vec::set1(factors_.decay[padded_ - 1]);
    over_pairs(tiles, [=](int d, int c, E* place, int lane) {
      const int even = d * kStripColumns + c, odd = even + kStripColumns;
      const Vec first = fma(Vec::load(state + even), decay, Vec::load(added + even));
      const Vec second = fma(Vec::load(state + odd), decay, Vec::load(added + odd));
      first.store(state + even);
      second.store(state + odd);
      Matrix::store_right(place, part_stride, lane, first, second);
    });
  }

  // Computes beta (V - e K S) of 32 tokens, zero for padding tokens.
  template <bool kWhole>
  void make_right_side(int64_t head, int64_t column, int row) {
    const T* v = args_.v.row<T>(token_begin_ + row, head) + column;
    const int64_t columns = item_.column_end - column, stride = args_.v.token_stride;
    const float *reads = reads_, *read = factors_.read + row, *beta = factors_.beta + row;
    const int count = count_ - row;
    auto value = [=](int i, int c) {
      if (i >= count) return Vec::zero();
      const T* place = v + i * stride + c;
      const Vec values = kWhole ? Vec::load(place) : Vec::load(place, columns - c < 0 ? 0 : columns - c);
      return fma(Vec::load(reads + i * kStripColumns + c), Vec::set1(read[i]), values * Vec::set1(beta[i]));
    };
    const Right<E> right = token_tiles(right_tiles_);
    over_pairs(right.tile(row / kTileDepth, 0), [=](int i, int c, E* place, int lane) {
      Matrix::store_right(place, right.part_stride, lane, value(i, c), value(i + 1, c));
    });
  }

  // Packs 32 rows of U as tiles, and decayed to the end of the chunk as tiles.
  void pack_added(int row) {
    const Right<E> added = token_tiles(added_tiles_);
    const int64_t to_left = left_tiles_ - added_tiles_;
    const float *rows = added_, *left = factors_.left + row;
    over_pairs(added.tile(row / kTileDepth, 0), [=](int i, int c, E* place, int lane) {
      const float* even = rows + i * kStripColumns + c;
      const Vec first = Vec::load(even), second = Vec::load(even + kStripColumns);
      Matrix::store_right(place, added.part_stride, lane, first, second);
      Matrix::store_right(place + to_left, added.part_stride, lane, first * Vec::set1(left[i]),
                          second * Vec::set1(left[i + 1]));
    });
  }

  // Stores e Q S + P U.
  void store_outputs(int64_t head, int64_t column, int first) {
    const int64_t columns = item_.column_end - column, width = columns < kStripColumns ? columns : kStripColumns;
    const int end = count_ < first + kBlockRows ? count_ : first + kBlockRows;
    T* out = args_.out.row<T>(token_begin_ + first, head) + column;
    const float *attended = reads_, *reads = reads_ + kBlock;
    for (int i = first; i < end;
         ++i, reads += kStripColumns, attended += kStripColumns, out += args_.out.token_stride) {
      const Vec query = Vec::set1(factors_.query[i]);
      for_each_vec(width, [&](int64_t c, auto count) {
        store_some(fma(Vec::load(reads + c), query, Vec::load(attended + c)), out + c, count);
      });
    }
  }

  const GatedDeltaArgs& args_;
  const DeltaItem item_;
  const int64_t key_head_;
  const int64_t depth_, depth_tiles_;  // of a head's keys, padded
  const int64_t num_strips_;
  int64_t size_bytes_ = 0;
  int64_t token_begin_ = 0, token_end_ = 0;  // of the chunk
  int count_ = 0, padded_ = 0;               // its tokens
  ChunkFactors factors_;
  Fetches fetches_ = {};
  Matrix matrix_;

  E* rows_;                                      // [parts][k, then q][padded][depth]
  E* columns_;                                   // [parts][depth][kChunkTokens]: k transposed
  E* key_tiles_;                                 // the same as right-hand tiles
  float* scores_;                                // [2 strips][k, then q][padded][32]: times k transposed
  float *lower_, *inverse_;                      // [kChunkTokens][kChunkTokens]: -L, its inverse where it has parts
  E *solver_, *weights_;                         // [parts][kChunkTokens][kChunkTokens]: the inverse, and P
  float* reads_;                                 // [k, then q][32][32]: times the state; P U in place of the first
  float* added_;                                 // [32][32]: U, then what it adds to the state
  E *right_tiles_, *added_tiles_, *left_tiles_;  // beta (V - e K S), U, and U decayed to the chunk's end
  float* states_;                                // [heads][strips][depth][32]
  E* state_tiles_;                               // the same as tiles
};

}  // namespace
}  // namespace tilewright
