#include "kernels/moe/moe.h"

#include <algorithm>

#include "base/parallel.h"
#include "base/scratch.h"
#include "kernels/linear/linear.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(moe, MoeKernels)

namespace {

// Bound on the experts' outputs of a chunk of tokens; more tokens are processed in several chunks. 4,096 tokens of 8
// experts of width 2,048 are then two chunks, each with enough rows per expert to hide the weights.
constexpr int64_t kMaxOutputBytes = int64_t{128} << 20;

// Columns of a token combined by one task.
constexpr int64_t kCombineColumns = 1024;

// The rows of one expert. Rows are sorted by expert; an expert's rows are cut into blocks of kRowBlock.
struct Group {
  int64_t expert;
  int64_t first_row, num_rows;
  int64_t first_block, num_blocks;
};

// Memory of one call, allocated piece by piece.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uintptr_t base_;  // null to compute the required size
  int64_t used_ = 0;
};

// One of the two products, for every expert that has rows: linear's tasks, group after group.
struct Product {
  LinearArgs args;       // of expert 0; m is set per group
  int64_t block_bytes;   // of a block of rows as the kernel reads it
  char* packed;          // such blocks, by number
  int64_t* first_tasks;  // [groups + 1]
  int64_t* strips_per_task;

  LinearArgs of(const Group& group) const {
    LinearArgs result = args;
    if (args.x_rows)
      result.x_rows += group.first_row;
    else
      result.x = args.x.from(group.first_row);
    result.y = args.y.from(group.first_row);
    result.weight = args.weight.expert(group.expert);
    result.m = group.num_rows;
    return result;
  }
};

// A call for one chunk of tokens.
class Call {
 public:
  explicit Call(const MoeArgs& args)
      : args_(args), kernels_(linear_kernels()), num_rows_(args.num_tokens * args.top_k) {
    max_groups_ = std::min(args.num_experts, num_rows_);
    max_blocks_ = num_rows_ / kRowBlock + max_groups_;
    describe_products();
    Arena measure(nullptr);
    place(measure);
    Arena memory(shared_scratch(static_cast<size_t>(measure.used())));
    place(memory);
    group_rows();
    split(gate_up_);
    split(down_);
  }

  void run() {
    const int64_t spans = ceil_div(args_.width(), kCombineColumns);
    const MoeKernels& kernels = select(kTable);
    const int64_t counts[] = {num_blocks_, gate_up_.first_tasks[num_groups_], num_blocks_,
                              down_.first_tasks[num_groups_], args_.num_tokens * spans};
    parallel_stages(counts, [&](int stage, int64_t task) {
      switch (stage) {
        case 0: return pack(gate_up_, task);
        case 1: return multiply(gate_up_, task);
        case 2: return pack(down_, task);
        case 3: return multiply(down_, task);
        default: {
          const int64_t token = task / spans, begin = task % spans * kCombineColumns;
          kernels.combine(args_, outputs_, places_ + token * args_.top_k, token, begin,
                          std::min(begin + kCombineColumns, args_.width()));
        }
      }
    });
  }

 private:
  void describe_products() {
    LinearArgs& first = gate_up_.args;
    first.x = args_.x;
    first.weight = args_.gate_up;
    first.y = {nullptr, args_.inner(), args_.x.dtype};
    first.activation = args_.activation;

    LinearArgs& second = down_.args;
    second.x = first.y;
    second.weight = args_.down;
    second.y = {nullptr, args_.width(), DType::f32};

    for (Product* product : {&gate_up_, &down_}) product->block_bytes = kernels_.block_bytes(product->args);
  }

  void place(Arena& arena) {
    groups_ = arena.take<Group>(max_groups_);
    block_groups_ = arena.take<int32_t>(max_blocks_);
    rows_ = arena.take<int32_t>(num_rows_);
    places_ = arena.take<int32_t>(num_rows_);
    next_rows_ = arena.take<int32_t>(args_.num_experts);
    for (Product* product : {&gate_up_, &down_}) {
      product->first_tasks = arena.take<int64_t>(max_groups_ + 1);
      product->strips_per_task = arena.take<int64_t>(max_groups_);
    }
    // x is read for the last time before the first block of act(gate) * up is packed, and that before the first output
    // is written: each pair shares its memory.
    char* packed = arena.take<char>(max_blocks_ * std::max(gate_up_.block_bytes, down_.block_bytes));
    gate_up_.packed = down_.packed = packed;
    const int64_t inner_bytes = args_.inner() * static_cast<int64_t>(size_of(args_.x.dtype));
    const int64_t output_bytes = args_.width() * static_cast<int64_t>(sizeof(float));
    char* between = arena.take<char>(num_rows_ * std::max(inner_bytes, output_bytes));
    gate_up_.args.y.data = between;
    gate_up_.args.x_rows = rows_;
    down_.args.x.data = down_.args.y.data = between;
    outputs_ = reinterpret_cast<float*>(between);
  }

  // Sorts the rows by expert: rows_ has each one's token, places_ the row of each token and choice.
  void group_rows() {
    std::fill_n(next_rows_, args_.num_experts, 0);
    for (int64_t i = 0; i < num_rows_; ++i) ++next_rows_[args_.ids[i]];
    int64_t first_row = 0;
    for (int64_t expert = 0; expert < args_.num_experts; ++expert) {
      const int64_t count = next_rows_[expert];
      if (count == 0) continue;
      next_rows_[expert] = static_cast<int32_t>(first_row);
      const int64_t blocks = ceil_div(count, kRowBlock);
      std::fill_n(block_groups_ + num_blocks_, blocks, static_cast<int32_t>(num_groups_));
      groups_[num_groups_++] = {expert, first_row, count, num_blocks_, blocks};
      first_row += count;
      num_blocks_ += blocks;
    }
    for (int64_t i = 0; i < num_rows_; ++i) {
      places_[i] = next_rows_[args_.ids[i]]++;
      rows_[places_[i]] = static_cast<int32_t>(i / args_.top_k);
    }
  }

  int64_t blocks_at_once(const Product& product, const Group& group) const {
    return blocks_per_group(product.args, product.block_bytes, group.num_blocks);
  }

  // Cuts each expert's product into tasks of about equal work, some 16 per thread. A strip counts as 4 to read and 1
  // for each block of rows: 128 KB at 16 GB/s take as long as a matrix unit takes to multiply them by four blocks.
  void split(Product& product) {
    const int64_t num_strips = product.args.weight.num_strips();
    const auto work = [&](const Group& group) { return 4 + blocks_at_once(product, group); };
    int64_t total = 0;
    for (int64_t g = 0; g < num_groups_; ++g)
      total += ceil_div(groups_[g].num_blocks, blocks_at_once(product, groups_[g])) * work(groups_[g]) * num_strips;
    const int64_t share = ceil_div(total, num_threads() * 16);
    product.first_tasks[0] = 0;
    for (int64_t g = 0; g < num_groups_; ++g) {
      // An odd number, as in linear: streams a power of two apart meet in the same memory banks.
      const int64_t strips = std::min(ceil_div(share, work(groups_[g])) | 1, num_strips);
      product.strips_per_task[g] = strips;
      product.first_tasks[g + 1] =
          product.first_tasks[g] +
          ceil_div(num_strips, strips) * ceil_div(groups_[g].num_blocks, blocks_at_once(product, groups_[g]));
    }
  }

  void pack(const Product& product, int64_t block) const {
    const Group& group = groups_[block_groups_[block]];
    kernels_.pack_block(product.of(group), block - group.first_block, product.packed + block * product.block_bytes);
  }

  void multiply(const Product& product, int64_t task) const {
    const int64_t* firsts = product.first_tasks;
    const int64_t g = std::upper_bound(firsts, firsts + num_groups_ + 1, task) - firsts - 1;
    const Group& group = groups_[g];
    const int64_t num_strips = product.args.weight.num_strips();
    const int64_t strips = product.strips_per_task[g], turns = ceil_div(num_strips, strips);
    const int64_t within = task - firsts[g];
    const int64_t blocks = blocks_at_once(product, group);
    const int64_t block = within / turns * blocks, strip = within % turns * strips;
    kernels_.run(product.of(group), product.packed + group.first_block * product.block_bytes, block,
                 std::min(block + blocks, group.num_blocks), strip, std::min(strip + strips, num_strips));
  }

  const MoeArgs& args_;
  const LinearKernels& kernels_;
  int64_t num_rows_, max_groups_, max_blocks_;
  int64_t num_groups_ = 0, num_blocks_ = 0;
  Product gate_up_, down_;
  Group* groups_;
  int32_t* block_groups_;
  int32_t* rows_;
  int32_t* places_;
  int32_t* next_rows_;
  float* outputs_;
};

MoeArgs chunk_of(const MoeArgs& args, int64_t begin, int64_t end) {
  MoeArgs chunk = args;
  chunk.x = args.x.from(begin);
  chunk.ids += begin * args.top_k;
  chunk.weights += begin * args.top_k;
  if (args.residual) chunk.residual = args.residual.from(begin);
  chunk.y = args.y.from(begin);
  chunk.num_tokens = end - begin;
  return chunk;
}

}  // namespace

void route(const RouteArgs& args) {
  const MoeKernels& kernels = select(kTable);
  const int64_t row_bytes = args.num_experts * 16;
  parallel_chunks(args.num_tokens, grain_for(args.num_tokens, row_bytes),
                  [&](int64_t begin, int64_t end) { kernels.route(args, begin, end); });
}

void moe(const MoeArgs& args) {
  if (args.num_tokens == 0) return;
  const int64_t token_bytes = args.top_k * args.width() * static_cast<int64_t>(sizeof(float));
  const int64_t num_chunks = ceil_div(args.num_tokens * token_bytes, kMaxOutputBytes);
  const int64_t chunk_tokens = ceil_div(args.num_tokens, num_chunks);
  for (int64_t begin = 0; begin < args.num_tokens; begin += chunk_tokens) {
    const MoeArgs chunk = chunk_of(args, begin, std::min(begin + chunk_tokens, args.num_tokens));
    Call(chunk).run();
  }
}

}  // namespace tilewright
