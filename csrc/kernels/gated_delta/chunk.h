// The gated delta rule in chunks of tokens, formulas in gated_delta.h. Include after a Vec and a Matrix, which has the
// products: VectorMatrix or TileMatrix.
//
// A state is worked on in strips of 32 columns, each through a whole chunk: its 16 KB and what is made of it stay in
// L1. q and k enter the products as they come; ChunkFactors make them of length 1.
#pragma once

#include "base/denormals.h"
#include "base/scratch.h"
#include "kernels/gated_delta/inverse.h"
#include "kernels/gated_delta/right.h"
#include "kernels/gated_delta/step.h"

namespace tilewright {
namespace {

// One number per token of a chunk, zero for those that pad it.
struct ChunkFactors {
  float k[kChunkTokens], q[kChunkTokens];  // to length 1, q scaled
  float beta[kChunkTokens];
  float since[kChunkTokens], since_rest[kChunkTokens];  // g summed up since the chunk began, in two parts
  float decay[kChunkTokens];                            // exp(since)
  // What a token's rows are multiplied with:
  float read[kChunkTokens];   // -beta decay k: of k S, to be taken from beta v
  float query[kChunkTokens];  // decay q: of q S
  float left[kChunkTokens];   // k times the decay from the token to the end of the chunk: of U, to be added to S
};

// Asks for the rows of the next chunk one line at a time, between the steps of this one: they lie a token's whole width
// apart, where no hardware looks ahead.
struct RowPrefetch {
  const char* row;
  int64_t stride_bytes, row_bytes;
  int64_t num_rows, offset = 0;

  void next() {
    // Into L2: rows a multiple of 4 KB apart would all fall into one set of L1.
    __builtin_prefetch(row + offset, 0, 2);
    offset += 64;
    if (offset < row_bytes) return;
    offset = 0;
    row += stride_bytes;
    --num_rows;
  }
};

template <class Matrix, class T>
class Chunks {
  using E = typename Matrix::Element;
  static constexpr int kParts = Matrix::kParts;
  static constexpr int64_t kSquare = kChunkTokens * kChunkTokens;

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
  }

  void run() {
    const FlushDenormals flush;
    load_states();
    const int64_t end = args_.starts[item_.sequence + 1];
    for (int64_t begin = args_.starts[item_.sequence]; begin < end; begin = token_end_) {
      begin_chunk(begin, end);
      for (int64_t head = item_.head_begin; head < item_.head_end; ++head) run_head(head);
      const int64_t slot = args_.write_slot(item_.sequence, token_end_ - 1);
      if (slot >= 0) store_states(slot);
    }
  }

 private:
  // Gives out the scratch memory; the first time, with none, only its size.
  void place(char* base) {
    size_bytes_ = 0;
    auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(reinterpret_cast<uintptr_t>(base) +
                                                                             static_cast<uintptr_t>(size_bytes_));
      size_bytes_ += round_up(count * static_cast<int64_t>(sizeof(*pointer)), 64);
    };
    take(rows_, 2 * kChunkTokens * depth_);
    take(columns_, depth_ * kChunkTokens);
    take(key_tiles_, kChunkTokens * depth_);
    take(scores_, 2 * 2 * kChunkTokens * kStripColumns);
    take(lower_, kSquare);
    take(inverse_, kSquare);
    take(solver_, kParts * kSquare);
    take(weights_, kParts * kSquare);
    take(state_tiles_, 2 * kParts * depth_ * kStripColumns);
    take(reads_, 2 * kChunkTokens * kStripColumns);
    take(added_, kChunkTokens * kStripColumns);
    take(right_tiles_, kParts * kChunkTokens * kStripColumns);
    take(added_tiles_, kParts * kChunkTokens * kStripColumns);
    take(left_tiles_, kParts * kChunkTokens * kStripColumns);
    take(states_, (item_.head_end - item_.head_begin) * num_strips_ * depth_ * kStripColumns);
  }

  float* strip_of(int64_t head, int64_t strip) const {
    return states_ + ((head - item_.head_begin) * num_strips_ + strip) * depth_ * kStripColumns;
  }

  // fn(strip, row of the strip, offset of that row in the head's state, columns it has) for each row of each strip.
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
    const int64_t slot = args_.read_slots[item_.sequence];
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      const float* state = args_.state(slot, head);
      for_each_row(head, [&](float* row, int64_t d, int64_t offset, int64_t count) {
        __builtin_memset(row, 0, kStripColumns * sizeof(float));
        if (state && d < args_.key_width) __builtin_memcpy(row, state + offset, count * sizeof(float));
      });
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

  // A chunk ends where the sequence does or where a state is to be kept. Rows are padded to whole strips.
  void begin_chunk(int64_t begin, int64_t end) {
    token_begin_ = begin;
    if (end > begin + kChunkTokens) end = begin + kChunkTokens;
    for (token_end_ = begin + 1; token_end_ < end; ++token_end_)
      if (args_.write_slot(item_.sequence, token_end_ - 1) >= 0) break;
    count_ = static_cast<int>(token_end_ - begin);
    padded_ = static_cast<int>(round_up(count_, kStripColumns));

    const T* k = static_cast<const T*>(args_.k) + begin * args_.k_token_stride + key_head_ * args_.k_head_stride;
    const T* q = static_cast<const T*>(args_.q) + begin * args_.q_token_stride + key_head_ * args_.q_head_stride;
    E* q_rows = rows_ + padded_ * depth_;
    for (int i = 0; i < count_; ++i, k += args_.k_token_stride, q += args_.q_token_stride) {
      factors_.k[i] = unit_factor(args_, Matrix::copy_row(k, args_.key_width, depth_, rows_ + i * depth_));
      factors_.q[i] =
          unit_factor(args_, Matrix::copy_row(q, args_.key_width, depth_, q_rows + i * depth_)) * args_.scale;
    }
    const size_t padding = static_cast<size_t>((padded_ - count_) * depth_) * sizeof(E);
    __builtin_memset(rows_ + count_ * depth_, 0, padding);
    __builtin_memset(q_rows + count_ * depth_, 0, padding);
    for (int i = count_; i < padded_; ++i) factors_.k[i] = factors_.q[i] = 0.0f;
    Matrix::transpose(rows_, padded_, depth_, key_tiles_, columns_);
    for (int s = 0; s < padded_ / kStripColumns; ++s) {
      const Right<E> keys = {key_tiles_ + s * kStripColumns * depth_, kTileElements, depth_ * kTileColumns, 0};
      NoPieces none;
      matrix_.template multiply<false>(rows_, depth_, 0, 1, 2 * padded_, keys, depth_tiles_,
                                       scores_ + s * 2 * kChunkTokens * kStripColumns, none);
    }
  }

  void load_gates(int64_t head) {
    double since = 0;
    for (int i = 0; i < padded_; ++i) {
      const int64_t token = token_begin_ + i;
      if (i < count_) since += args_.g[token * args_.g_stride + head];
      factors_.beta[i] = i < count_ ? args_.beta[token * args_.beta_stride + head] : 0.0f;
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

  // P, and L for the inverse. Decays between two tokens are exponentials of differences, never quotients: no e is too
  // small for them.
  void make_square(int64_t head) {
    load_gates(head);
    for (int i = 0; i < padded_; ++i) {
      const Vec sum = Vec::set1(factors_.since[i]), rest = Vec::set1(factors_.since_rest[i]);
      const Vec k_factor = Vec::set1(factors_.beta[i] * factors_.k[i]), q_factor = Vec::set1(factors_.q[i]);
      for (int j = 0; j < i / kStripColumns * kStripColumns + kStripColumns; j += Vec::kLanes) {
        if (j > i) {
          Matrix::store_left(weights_ + i * kChunkTokens + j, kSquare, Vec::zero());
          continue;
        }
        const float* score = scores_ + j / kStripColumns * 2 * kChunkTokens * kStripColumns + j % kStripColumns;
        const Vec between = (sum - Vec::load(factors_.since + j)) + (rest - Vec::load(factors_.since_rest + j));
        const Vec weight = exp(min(between, Vec::zero())) * Vec::load(factors_.k + j);
        const Vec lower = Vec::load(score + i * kStripColumns) * (k_factor * weight);
        const Vec attention = Vec::load(score + (padded_ + i) * kStripColumns) * (q_factor * weight);
        keep_lanes(lower, 0, i - j, Vec::zero()).store(lower_ + i * kChunkTokens + j);
        Matrix::store_left(weights_ + i * kChunkTokens + j, kSquare, keep_lanes(attention, 0, i + 1 - j, Vec::zero()));
      }
    }
    invert_unit_lower(lower_, inverse_, kChunkTokens, padded_);
    for (int i = 0; i < padded_; ++i)
      for (int j = 0; j < i / kStripColumns * kStripColumns + kStripColumns; j += Vec::kLanes) {
        const bool written = j < i / kInverseBlock * kInverseBlock + kInverseBlock;
        const Vec v = written ? Vec::load(inverse_ + i * kChunkTokens + j) : Vec::zero();
        Matrix::store_left(solver_ + i * kChunkTokens + j, kSquare, v);
      }
  }

  // c [tokens, 32] = A B, or +=, with A [tokens, tokens] lower triangular: 32 rows reach no deeper than their own end.
  template <bool kAccumulate, class Beside>
  void multiply_lower(const E* a, const Right<E>& b, float* c, Beside& beside) {
    for (int row = 0; row < padded_; row += kStripColumns)
      matrix_.template multiply<kAccumulate>(a + row * kChunkTokens, kChunkTokens, kSquare, kParts, kStripColumns, b,
                                             row / kStripColumns + 1, c + row * kStripColumns, beside);
  }

  // A piece of work is one Vec of a pair of rows of a strip.
  static constexpr int kPiecesPerPair = kStripColumns / Vec::kLanes;

  // Pieces of fn(row, column, place, lane): `place` is the pair's row in the tiles of `right`, `lane` its column there.
  template <class Fn>
  auto over_pairs(int64_t rows, const Right<E>& right, Fn fn) {
    auto piece = [this, right, fn](int64_t index) {
      fetch_next();
      const int64_t pair = index / kPiecesPerPair;
      const int column = static_cast<int>(index % kPiecesPerPair) * Vec::kLanes;
      fn(2 * pair, column, right.tile(pair / 16, column / kTileColumns) + pair % 16 * 32, column % kTileColumns);
    };
    return Pieces<decltype(piece)>{piece, rows / 2 * kPiecesPerPair};
  }

  // The rows of the chunk after this one: v of this head and, once, q and k.
  void plan_fetches(int64_t head) {
    const int64_t left = args_.starts[item_.sequence + 1] - token_end_;
    const int64_t rows = left < kChunkTokens ? left : kChunkTokens;
    auto plan = [&](const void* data, int64_t token_stride, int64_t head_offset, int64_t width, int64_t num_rows) {
      const T* row = static_cast<const T*>(data) + token_end_ * token_stride + head_offset;
      const int64_t element = static_cast<int64_t>(sizeof(T));
      return RowPrefetch{reinterpret_cast<const char*>(row), token_stride * element, width * element, num_rows};
    };
    const int64_t key_rows = head == item_.head_begin ? rows : 0;
    fetches_[0] = plan(args_.v, args_.v_token_stride, head * args_.v_head_stride + item_.column_begin,
                       item_.column_end - item_.column_begin, rows);
    fetches_[1] = plan(args_.k, args_.k_token_stride, key_head_ * args_.k_head_stride, args_.key_width, key_rows);
    fetches_[2] = plan(args_.q, args_.q_token_stride, key_head_ * args_.q_head_stride, args_.key_width, key_rows);
  }

  void fetch_next() {
    for (RowPrefetch& fetch : fetches_)
      if (fetch.num_rows > 0) return fetch.next();
  }

  void run_head(int64_t head) {
    plan_fetches(head);
    make_square(head);
    pack_state(head, 0).rest();
    for (int64_t strip = 0; strip < num_strips_; ++strip) {
      auto next_state = pack_state(head, strip + 1);
      const int64_t column = item_.column_begin + strip * kStripColumns;
      if (item_.column_end - column >= kStripColumns)
        run_strip(head, strip, column, next_state, right_side<true>(head, column));
      else
        run_strip(head, strip, column, next_state, right_side<false>(head, column));
      next_state.rest();
    }
  }

  // Two strips of a state as tiles: while one is worked on, the next is made.
  Right<E> state_tiles(int64_t strip) const {
    return Right<E>::of_strip(state_tiles_ + strip % 2 * kParts * depth_ * kStripColumns, depth_tiles_);
  }
  Right<E> token_tiles(E* data) const { return Right<E>::of_strip(data, kChunkTokens / kTileDepth); }

  // A strip of a state as tiles, and decayed to the end of the chunk. None beyond the last strip.
  auto pack_state(int64_t head, int64_t strip) {
    float* state = strip_of(head, strip);
    const Vec decay = Vec::set1(factors_.decay[padded_ - 1]);
    const Right<E> tiles = state_tiles(strip);
    return over_pairs(strip < num_strips_ ? depth_ : 0, tiles, [=](int64_t d, int c, E* place, int lane) {
      float* even = state + d * kStripColumns + c;
      float* odd = even + kStripColumns;
      const Vec first = Vec::load(even), second = Vec::load(odd);
      Matrix::store_right(place, tiles.part_stride, lane, first, second);
      (first * decay).store(even);
      (second * decay).store(odd);
    });
  }

  // beta (V - e K S), zero for the tokens that pad the chunk.
  template <bool kWhole>
  auto right_side(int64_t head, int64_t column) {
    const T* v =
        static_cast<const T*>(args_.v) + token_begin_ * args_.v_token_stride + head * args_.v_head_stride + column;
    const int64_t columns = item_.column_end - column;
    auto value = [this, v, columns](int64_t i, int c) {
      if (i >= count_) return Vec::zero();
      const T* place = v + i * args_.v_token_stride + c;
      const Vec values = kWhole ? Vec::load(place) : Vec::load(place, columns - c < 0 ? 0 : columns - c);
      return fma(Vec::load(reads_ + i * kStripColumns + c), Vec::set1(factors_.read[i]),
                 values * Vec::set1(factors_.beta[i]));
    };
    const Right<E> right = token_tiles(right_tiles_);
    return over_pairs(padded_, right, [=](int64_t i, int c, E* place, int lane) {
      Matrix::store_right(place, right.part_stride, lane, value(i, c), value(i + 1, c));
    });
  }

  // U as tiles, U decayed to the end of the chunk as tiles, and q S made ready for P U to be added.
  auto added_values() {
    const Right<E> added = token_tiles(added_tiles_), left = token_tiles(left_tiles_);
    return over_pairs(padded_, added, [=, this](int64_t i, int c, E* place, int lane) {
      const float* row = added_ + i * kStripColumns + c;
      const Vec first = Vec::load(row), second = Vec::load(row + kStripColumns);
      Matrix::store_right(place, added.part_stride, lane, first, second);
      Matrix::store_right(left.data + (place - added.data), left.part_stride, lane, first * Vec::set1(factors_.left[i]),
                          second * Vec::set1(factors_.left[i + 1]));
      float* read = reads_ + (padded_ + i) * kStripColumns + c;
      (Vec::load(read) * Vec::set1(factors_.query[i])).store(read);
      (Vec::load(read + kStripColumns) * Vec::set1(factors_.query[i + 1])).store(read + kStripColumns);
    });
  }

  template <class NextState, class RightSide>
  void run_strip(int64_t head, int64_t strip, int64_t column, NextState& next_state, RightSide right_side) {
    const Right<E> state = state_tiles(strip);
    float* q_reads = reads_ + padded_ * kStripColumns;
    matrix_.template multiply<false>(rows_, depth_, 0, 1, padded_, state, depth_tiles_, reads_, next_state);
    matrix_.template multiply<false>(rows_ + padded_ * depth_, depth_, 0, 1, padded_, state, depth_tiles_, q_reads,
                                     right_side);
    right_side.rest();
    multiply_lower<false>(solver_, token_tiles(right_tiles_), added_, next_state);
    added_values().rest();
    multiply_lower<true>(weights_, token_tiles(added_tiles_), q_reads, next_state);
    auto outputs = out_rows(head, column);
    matrix_.template multiply<true>(columns_, kChunkTokens, 0, 1, depth_, token_tiles(left_tiles_),
                                    padded_ / kTileDepth, strip_of(head, strip), outputs);
    outputs.rest();
  }

  // The outputs of a strip, a token to a piece.
  auto out_rows(int64_t head, int64_t column) {
    const int64_t columns = item_.column_end - column, width = columns < kStripColumns ? columns : kStripColumns;
    T* out = static_cast<T*>(args_.out) + token_begin_ * args_.out_token_stride + head * args_.out_head_stride + column;
    auto piece = [this, out, width](int64_t i) {
      const float* row = reads_ + (padded_ + i) * kStripColumns;
      T* target = out + i * args_.out_token_stride;
      for_each_vec(width, [&](int64_t c, auto count) { store_some(Vec::load(row + c), target + c, count); });
    };
    return Pieces<decltype(piece)>{piece, count_};
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
  RowPrefetch fetches_[3];
  Matrix matrix_;

  E* rows_;                                      // [k, then q][padded][depth]
  E* columns_;                                   // [depth][kChunkTokens]: k transposed
  E* key_tiles_;                                 // the same as right-hand tiles
  float* scores_;                                // [2 strips][k, then q][padded][32]: times k transposed
  float *lower_, *inverse_;                      // [kChunkTokens][kChunkTokens]
  E *solver_, *weights_;                         // [parts][kChunkTokens][kChunkTokens]: the inverse, and P
  E* state_tiles_;                               // of two strips
  float* reads_;                                 // [k, then q][padded][32]: times the state; then the output
  float* added_;                                 // [padded][32]: U
  E *right_tiles_, *added_tiles_, *left_tiles_;  // beta (V - e K S), U, and U decayed to the chunk's end
  float* states_;                                // [heads][strips][depth][32]
};

}  // namespace
}  // namespace tilewright
