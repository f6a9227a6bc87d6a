#include "parallel/collective.h"

#include <algorithm>
#include <cstring>

#include "kernels/norm/norm.h"
#include "kernels/reduce/reduce.h"

namespace tilewright {
namespace {

static_assert(kMaxRanks <= kMaxSummands);

// Up to this size of all ranks' parts together, every rank sums them all itself: one barrier instead of two. Two ranks
// with 64 KB each took 14 us this way, and 12 in slices.
constexpr int64_t kOnePhaseBytes = 64 << 10;
constexpr int64_t kLineBytes = 64;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

void copy(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// `count` elements in pieces of one length, a multiple of `unit` and at most `max_length`; the last may be shorter. An
// empty message is one empty piece, so that its ranks still meet.
struct Chunks {
  Chunks(int64_t count, int64_t max_length, int64_t unit) : count(count) {
    const int64_t pieces = std::max<int64_t>(1, (count + max_length - 1) / max_length);
    length = std::max<int64_t>(unit, round_up((count + pieces - 1) / pieces, unit));
    num = std::max<int64_t>(1, (count + length - 1) / length);
  }
  int64_t begin(int64_t chunk) const { return chunk * length; }
  int64_t size(int64_t chunk) const { return std::min(length, count - chunk * length); }

  int64_t count, length, num;
};

// Elements of the largest chunk for which a slot has a place per rank, in whole cache lines.
int64_t places_length(int64_t slot_bytes, int num_ranks, DType dtype) {
  return slot_bytes / num_ranks / kLineBytes * kLineBytes / static_cast<int64_t>(size_of(dtype)) * num_ranks;
}

// The operands of a sum over ranks, and its use.
struct Reduction {
  const char* x;
  const char* addend;  // optional: one more summand, after all ranks
  char* out;
  int64_t count;
  DType x_dtype, dtype;                     // of x; of addend and out, never the larger: sums take the places of x
  int64_t unit = 1;                         // elements that belong together: a row of a norm
  const AllReduceNormArgs* norm = nullptr;  // optional: the norm of out's rows

  int64_t x_bytes() const { return static_cast<int64_t>(size_of(x_dtype)); }  // of an element
  int64_t out_bytes() const { return static_cast<int64_t>(size_of(dtype)); }

  // Sums elements [begin, end), counted from element `first` of x, which is `at(rank)` in the other ranks' slots.
  template <class At>
  void sum(const Turn& turn, int64_t first, int64_t begin, int64_t end, At at, char* second) const {
    const char* own = x + first * x_bytes();
    ReduceArgs args;
    args.num_summands = turn.size();
    for (int rank = 0; rank < turn.size(); ++rank) args.x[rank] = rank == turn.rank() ? own : at(rank);
    args.addend = addend ? addend + first * out_bytes() : nullptr;
    args.out = out + first * out_bytes();
    args.copy = second;
    args.x_dtype = x_dtype;
    args.dtype = dtype;
    reduce_span(args, begin, end);
  }

  void finish(int64_t begin, int64_t end) const {
    if (!norm) return;
    const int64_t offset = begin * out_bytes();
    NormArgs args;
    args.x = {out + offset, norm->width, 0, dtype};
    args.y = {static_cast<char*>(norm->out) + offset, norm->width, 0, dtype};
    args.weight = norm->weight;
    args.outer = (end - begin) / norm->width;
    args.width = norm->width;
    args.eps = norm->eps;
    args.weight_plus_one = norm->weight_plus_one;
    args.weight_dtype = norm->weight_dtype;
    rms_norm(args);
  }
};

// Every rank publishes all of its x, and sums all ranks' x.
class OnePhase {
 public:
  static constexpr int kStages = 2;

  OnePhase(const Turn& turn, const Reduction& reduction) : turn_(turn), r_(reduction) {}

  int64_t num_chunks() const { return 1; }
  int64_t num_items(int, int64_t) const { return r_.count / r_.unit; }
  int64_t item_bytes(int) const { return r_.unit * r_.x_bytes(); }
  void work(int stage, int64_t, int64_t begin, int64_t end) const {
    begin *= r_.unit, end *= r_.unit;
    if (stage == 0) {
      const int64_t offset = begin * r_.x_bytes();
      return copy(turn_.own_slot() + offset, r_.x + offset, (end - begin) * r_.x_bytes());
    }
    r_.sum(turn_, 0, begin, end, [&](int rank) { return turn_.slot_of(rank); }, nullptr);
    r_.finish(begin, end);
  }

 private:
  const Turn& turn_;
  const Reduction& r_;
};

// A chunk has a slice for each rank. Stage 0 publishes the slices of the others, stage 1 sums the own one and publishes
// the result, stage 2 collects the results of the others. A slot has a place per rank. In the slot of rank r, place q
// holds r's part of q's sum; and place r holds what r has summed, of the previous chunk.
class TwoPhase {
 public:
  static constexpr int kStages = 3;

  TwoPhase(const Turn& turn, const Reduction& reduction)
      : turn_(turn),
        r_(reduction),
        line_(kLineBytes / r_.x_bytes()),
        chunks_(r_.count, places_length(turn.slot_bytes(), turn.size(), r_.x_dtype) / r_.unit * r_.unit,
                r_.unit == 1 ? line_ : r_.unit),
        place_(slice_length(chunks_.length)) {}

  int64_t num_chunks() const { return chunks_.num; }
  int64_t num_items(int stage, int64_t chunk) const {
    const int64_t size = chunks_.size(chunk);
    if (stage == 1) return slice_end(turn_.rank(), size) - slice_begin(turn_.rank(), size);
    return stage == 2 ? size / r_.unit : size;
  }
  int64_t item_bytes(int stage) const { return (stage == 2 ? r_.unit : 1) * r_.x_bytes(); }
  void work(int stage, int64_t chunk, int64_t begin, int64_t end) const {
    if (stage == 0) return show(chunk, begin, end);
    if (stage == 1) return sum(chunk, begin, end);
    collect(chunk, begin * r_.unit, end * r_.unit);
    r_.finish(chunks_.begin(chunk) + begin * r_.unit, chunks_.begin(chunk) + end * r_.unit);
  }

 private:
  // Whole cache lines, so that no two threads or ranks write to one.
  int64_t slice_length(int64_t size) const { return round_up((size + turn_.size() - 1) / turn_.size(), line_); }
  int64_t slice_begin(int rank, int64_t size) const { return std::min(size, rank * slice_length(size)); }
  int64_t slice_end(int rank, int64_t size) const { return std::min(size, (rank + 1) * slice_length(size)); }

  // fn(begin, end, rank, offset) for the parts of [begin, end) that lie in slices of other ranks; each begins at
  // element `offset` of that rank's slice.
  template <class Fn>
  void for_other_slices(int64_t chunk, int64_t begin, int64_t end, Fn fn) const {
    const int64_t size = chunks_.size(chunk);
    for (int rank = 0; rank < turn_.size(); ++rank) {
      const int64_t first = std::max(begin, slice_begin(rank, size)), last = std::min(end, slice_end(rank, size));
      if (rank == turn_.rank() || first >= last) continue;
      fn(first, last, rank, first - slice_begin(rank, size));
    }
  }

  // Byte offset of a rank's place in a slot: of elements of x, or of sums, which are no larger.
  int64_t place_of(int rank) const { return rank * place_ * r_.x_bytes(); }

  void show(int64_t chunk, int64_t begin, int64_t end) const {
    char* slot = turn_.own_slot();
    const char* x = r_.x + chunks_.begin(chunk) * r_.x_bytes();
    for_other_slices(chunk, begin, end, [&](int64_t first, int64_t last, int rank, int64_t offset) {
      copy(slot + place_of(rank) + offset * r_.x_bytes(), x + first * r_.x_bytes(), (last - first) * r_.x_bytes());
    });
  }

  void sum(int64_t chunk, int64_t begin, int64_t end) const {
    const int64_t first = chunks_.begin(chunk) + slice_begin(turn_.rank(), chunks_.size(chunk));
    const int64_t place = place_of(turn_.rank());
    const auto at = [&](int rank) { return turn_.slot_of(rank) + place; };
    r_.sum(turn_, first, begin, end, at, turn_.own_slot() + place);
  }

  void collect(int64_t chunk, int64_t begin, int64_t end) const {
    char* out = r_.out + chunks_.begin(chunk) * r_.out_bytes();
    for_other_slices(chunk, begin, end, [&](int64_t first, int64_t last, int rank, int64_t offset) {
      const char* sums = turn_.slot_of(rank) + place_of(rank) + offset * r_.out_bytes();
      copy(out + first * r_.out_bytes(), sums, (last - first) * r_.out_bytes());
    });
  }

  const Turn& turn_;
  const Reduction& r_;
  int64_t line_;  // elements of a cache line
  Chunks chunks_;
  int64_t place_;  // elements of a place
};

void reduce_to_all(Turn& turn, const Reduction& reduction) {
  if (reduction.count * reduction.x_bytes() <= std::min(kOnePhaseBytes / turn.size(), turn.slot_bytes()))
    turn.run(OnePhase(turn, reduction));
  else
    turn.run(TwoPhase(turn, reduction));
}

// Stage 0 publishes each other rank's part, stage 1 sums the published parts of the own one.
class Scatter {
 public:
  static constexpr int kStages = 2;

  Scatter(const Turn& turn, const ReduceScatterArgs& args)
      : turn_(turn),
        args_(args),
        element_(static_cast<int64_t>(size_of(args.dtype))),
        chunks_(args.count, places_length(turn.slot_bytes(), turn.size(), args.dtype) / turn.size(),
                kLineBytes / element_) {}

  int64_t num_chunks() const { return chunks_.num; }
  int64_t num_items(int, int64_t chunk) const { return chunks_.size(chunk); }
  int64_t item_bytes(int) const { return turn_.size() * element_; }
  void work(int stage, int64_t chunk, int64_t begin, int64_t end) const {
    stage == 0 ? show(chunk, begin, end) : sum(chunk, begin, end);
  }

 private:
  const char* part_of(int rank, int64_t chunk) const {
    return static_cast<const char*>(args_.x) + (rank * args_.count + chunks_.begin(chunk)) * element_;
  }
  int64_t place(int rank) const { return rank * chunks_.length * element_; }

  void show(int64_t chunk, int64_t begin, int64_t end) const {
    for (int rank = 0; rank < turn_.size(); ++rank)
      if (rank != turn_.rank())
        copy(turn_.own_slot() + place(rank) + begin * element_, part_of(rank, chunk) + begin * element_,
             (end - begin) * element_);
  }

  void sum(int64_t chunk, int64_t begin, int64_t end) const {
    ReduceArgs args;
    args.num_summands = turn_.size();
    for (int rank = 0; rank < turn_.size(); ++rank)
      args.x[rank] = rank == turn_.rank() ? part_of(rank, chunk) : turn_.slot_of(rank) + place(turn_.rank());
    args.out = static_cast<char*>(args_.out) + chunks_.begin(chunk) * element_;
    args.x_dtype = args.dtype = args_.dtype;
    reduce_span(args, begin, end);
  }

  const Turn& turn_;
  const ReduceScatterArgs& args_;
  int64_t element_;
  Chunks chunks_;
};

// Stage 0 publishes x, stage 1 collects all of them.
class Gather {
 public:
  static constexpr int kStages = 2;

  Gather(const Turn& turn, const AllGatherArgs& args)
      : turn_(turn),
        args_(args),
        element_(static_cast<int64_t>(size_of(args.x.dtype))),
        chunks_(args.rows * args.width, turn.slot_bytes() / element_, kLineBytes / element_) {}

  int64_t num_chunks() const { return chunks_.num; }
  int64_t num_items(int, int64_t chunk) const { return chunks_.size(chunk); }
  int64_t item_bytes(int stage) const { return (stage ? turn_.size() : 1) * element_; }
  void work(int stage, int64_t chunk, int64_t begin, int64_t end) const {
    stage == 0 ? show(chunk, begin, end) : collect(chunk, begin, end);
  }

 private:
  // fn(i, count, row, column) for the part of each row of x in elements [begin, end) of a chunk; it begins at the
  // chunk's element i.
  template <class Fn>
  void for_rows(int64_t chunk, int64_t begin, int64_t end, Fn fn) const {
    for (int64_t i = begin, count; i < end; i += count) {
      const int64_t row = (chunks_.begin(chunk) + i) / args_.width, column = (chunks_.begin(chunk) + i) % args_.width;
      count = std::min(end - i, args_.width - column);
      fn(i, count, row, column);
    }
  }

  char* element_of(const Rows& rows, int64_t row, int64_t column) const {
    return static_cast<char*>(rows.data) + (row * rows.stride + column) * element_;
  }

  void show(int64_t chunk, int64_t begin, int64_t end) const {
    for_rows(chunk, begin, end, [&](int64_t i, int64_t count, int64_t row, int64_t column) {
      copy(turn_.own_slot() + i * element_, element_of(args_.x, row, column), count * element_);
    });
  }

  void collect(int64_t chunk, int64_t begin, int64_t end) const {
    for (int rank = 0; rank < turn_.size(); ++rank)
      for_rows(chunk, begin, end, [&](int64_t i, int64_t count, int64_t row, int64_t column) {
        const int64_t out_column = rank * args_.width + column;
        const int64_t kept = std::min(count, args_.out_width - out_column);
        if (kept <= 0) return;
        const char* from = rank == turn_.rank() ? element_of(args_.x, row, column) : turn_.slot_of(rank) + i * element_;
        copy(element_of(args_.out, row, out_column), from, kept * element_);
      });
  }

  const Turn& turn_;
  const AllGatherArgs& args_;
  int64_t element_;
  Chunks chunks_;
};

// Stage 0 runs on the root, stage 1 on the others.
class Spread {
 public:
  static constexpr int kStages = 2;

  Spread(const Turn& turn, const BroadcastArgs& args)
      : turn_(turn),
        args_(args),
        chunks_(args.count * static_cast<int64_t>(size_of(args.dtype)), turn.slot_bytes(), kLineBytes) {}

  int64_t num_chunks() const { return chunks_.num; }
  int64_t num_items(int stage, int64_t chunk) const {
    return (stage == 0) == (turn_.rank() == args_.root) ? chunks_.size(chunk) : 0;
  }
  int64_t item_bytes(int) const { return 1; }
  void work(int stage, int64_t chunk, int64_t begin, int64_t end) const {
    char* x = static_cast<char*>(args_.x) + chunks_.begin(chunk) + begin;
    stage == 0 ? copy(turn_.own_slot() + begin, x, end - begin)
               : copy(x, turn_.slot_of(args_.root) + begin, end - begin);
  }

 private:
  const Turn& turn_;
  const BroadcastArgs& args_;
  Chunks chunks_;  // of bytes
};

}  // namespace

int64_t max_norm_width(const SharedGroup& group, DType x_dtype) {
  return places_length(group.slot_bytes(), group.size(), x_dtype);
}

void all_reduce(const AllReduceArgs& args) {
  Turn turn(*args.group, {Call::all_reduce, args.dtype, 0, args.count});
  reduce_to_all(turn, {static_cast<const char*>(args.x), nullptr, static_cast<char*>(args.out), args.count, args.dtype,
                       args.dtype});
}

void all_reduce_add(const AllReduceAddArgs& args) {
  Turn turn(*args.group, {Call::all_reduce_add, args.x_dtype, 0, args.count, args.dtype});
  reduce_to_all(turn, {static_cast<const char*>(args.x), static_cast<const char*>(args.residual),
                       static_cast<char*>(args.out), args.count, args.x_dtype, args.dtype});
}

void all_reduce_norm(const AllReduceNormArgs& args) {
  const int64_t count = args.rows * args.width;
  Turn turn(*args.group, {Call::all_reduce_norm, args.x_dtype, 0, count, args.dtype});
  char* residual = static_cast<char*>(args.residual);
  reduce_to_all(
      turn, {static_cast<const char*>(args.x), residual, residual, count, args.x_dtype, args.dtype, args.width, &args});
}

void reduce_scatter(const ReduceScatterArgs& args) {
  Turn turn(*args.group, {Call::reduce_scatter, args.dtype, 0, args.count});
  turn.run(Scatter(turn, args));
}

void all_gather(const AllGatherArgs& args) {
  Turn turn(*args.group, {Call::all_gather, args.x.dtype, 0, args.rows * args.width});
  turn.run(Gather(turn, args));
}

void broadcast(const BroadcastArgs& args) {
  Turn turn(*args.group, {Call::broadcast, args.dtype, args.root, args.count});
  turn.run(Spread(turn, args));
}

void barrier(const BarrierArgs& args) {
  Turn turn(*args.group, {Call::barrier});
  turn.pass_barrier();
}

void copy_rows(const CopyRowsArgs& args) {
  const int64_t row_bytes = args.width * static_cast<int64_t>(size_of(args.x.dtype));
  parallel_chunks(args.rows, grain_for(args.rows, 2 * row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) copy(args.out.from(row).data, args.x.from(row).data, row_bytes);
  });
}

}  // namespace tilewright
