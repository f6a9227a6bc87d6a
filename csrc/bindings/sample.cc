#include "kernels/sample/sample.h"

#include <cmath>

#include "bindings/tensor.h"

namespace tilewright {
namespace {

constexpr DTypes kFloat32 = one_of({DType::f32});
constexpr DTypes kFloat64 = one_of({DType::f64});
constexpr DTypes kInt32 = one_of({DType::i32});
constexpr DTypes kInt64 = one_of({DType::i64});

LogitRows logits_of(Op& op, nb::handle arg) {
  const Tensor logits = op.tensor(arg, "logits", {"B", "V"}, kFloats);
  OP_REQUIRE(op, op["V"] >= 1, "logits is " + to_string(logits) + ", expected a vocabulary of 1 or more");
  return {logits.data, logits.stride(0), op["B"], op["V"], logits.dtype};
}

// Values [B] within [least, most]; NaN is in no range.
template <class T>
const T* values_in(Op& op, nb::handle arg, const char* name, DTypes dtypes, T least, T most) {
  const Tensor values = op.tensor(arg, name, {"B"}, dtypes);
  for (int64_t i = 0; i < op["B"]; ++i) {
    const T value = values.as<T>()[i];
    OP_REQUIRE(op, value >= least && value <= most,
               std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) + ", expected " +
                   std::to_string(least) + " to " + std::to_string(most));
  }
  return values.as<T>();
}

const int64_t* tokens_of(Op& op, const Tensor& ids) {
  const int64_t vocabulary = op["V"];
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int64_t id = ids.as<int64_t>()[i];
    OP_REQUIRE(op, id >= 0 && id < vocabulary,
               std::string(ids.name) + "[" + std::to_string(i) + "] is " + std::to_string(id) +
                   ", the vocabulary has " + std::to_string(vocabulary) + " tokens");
  }
  return ids.as<int64_t>();
}

// Starts [B + 1] of the rows' lists within `size` entries.
const int64_t* starts_of(Op& op, nb::handle arg, const char* name, int64_t size) {
  const Tensor tensor = op.tensor(arg, name, {"_"}, kInt64);
  const int64_t* starts = tensor.as<int64_t>();
  const int64_t rows = op["B"];
  bool rising = tensor.size(0) == rows + 1 && starts[0] == 0 && starts[rows] == size;
  for (int64_t i = 0; rising && i < rows; ++i) rising = starts[i] <= starts[i + 1];
  OP_REQUIRE(op, rising,
             std::string(name) + " must be B + 1 = " + std::to_string(rows + 1) + " rising offsets from 0 to " +
                 std::to_string(size));
  return starts;
}

SampleArgs filter_of(Op& op, nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p,
                     nb::handle min_p) {
  SampleArgs args;
  args.logits = logits_of(op, logits);
  args.temperature = values_in<float>(op, temperature, "temperature", kFloat32, 0.0f, 1e6f);
  args.top_k = values_in<int64_t>(op, top_k, "top_k", kInt64, 0, INT64_MAX);
  args.top_p = values_in<float>(op, top_p, "top_p", kFloat32, 0.0f, 1.0f);
  args.min_p = values_in<float>(op, min_p, "min_p", kFloat32, 0.0f, 1.0f);
  return args;
}

void bind_penalize(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "penalize",
      [](nb::handle logits, nb::handle starts, nb::handle token_ids, nb::handle counts, nb::handle repetition,
         nb::handle presence, nb::handle frequency, nb::handle bias_starts, nb::handle bias_token_ids,
         nb::handle bias) {
        Op op("penalize");
        PenaltyArgs args;
        args.logits = logits_of(op, logits);
        const Tensor ids = op.tensor(token_ids, "token_ids", {"N"}, kInt64);
        args.token_ids = tokens_of(op, ids);
        args.starts = starts_of(op, starts, "starts", op["N"]);
        args.counts = op.tensor(counts, "counts", {"N"}, kInt32).as<int32_t>();
        args.repetition = values_in<float>(op, repetition, "repetition", kFloat32, 1e-6f, 1e6f);
        args.presence = values_in<float>(op, presence, "presence", kFloat32, -1e6f, 1e6f);
        args.frequency = values_in<float>(op, frequency, "frequency", kFloat32, -1e6f, 1e6f);
        if (!bias.is_none()) {
          const Tensor biased = op.tensor(bias_token_ids, "bias_token_ids", {"M"}, kInt64);
          args.bias_token_ids = tokens_of(op, biased);
          args.bias_starts = starts_of(op, bias_starts, "bias_starts", op["M"]);
          args.bias = op.tensor(bias, "bias", {"M"}, kFloat32).as<float>();
        }
        launch(penalize, args);
      },
      "logits"_a, "starts"_a, "token_ids"_a, "counts"_a, "repetition"_a, "presence"_a, "frequency"_a,
      "bias_starts"_a.none(), "bias_token_ids"_a.none(), "bias"_a.none());
}

void bind_mask(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "mask",
      [](nb::handle logits, nb::handle rows, nb::handle words) {
        Op op("mask");
        MaskArgs args;
        const Tensor values = op.tensor(logits, "logits", {"B", "V"}, kFloat32);
        args.logits = {values.data, values.stride(0), op["B"], op["V"], values.dtype};
        args.rows = op.tensor(rows, "rows", {"R"}, kInt64).as<int64_t>();
        args.count = op["R"];
        for (int64_t i = 0; i < args.count; ++i)
          OP_REQUIRE(op, args.rows[i] >= 0 && args.rows[i] < op["B"],
                     "rows[" + std::to_string(i) + "] is " + std::to_string(args.rows[i]) + ", logits has " +
                         std::to_string(op["B"]) + " rows");
        const Tensor bits = op.tensor(words, "words", {"R", "W"}, kInt32);
        OP_REQUIRE(op, op["W"] * 32 >= op["V"],
                   "words has " + std::to_string(op["W"]) + " columns of 32 bits, the vocabulary has " +
                       std::to_string(op["V"]) + " tokens");
        args.words = bits.as<int32_t>();
        args.word_stride = bits.stride(0);
        launch(mask, args);
      },
      "logits"_a, "rows"_a, "words"_a);
}

}  // namespace

void bind_sample(nb::module_& m) {
  using namespace nb::literals;
  bind_penalize(m);
  bind_mask(m);
  m.def(
      "sample",
      [](nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
         nb::handle uniform, nb::handle out) {
        Op op("sample");
        SampleArgs args = filter_of(op, logits, temperature, top_k, top_p, min_p);
        args.uniform = values_in<double>(op, uniform, "uniform", kFloat64, 0.0, std::nextafter(1.0, 0.0));
        args.token_ids = op.tensor(out, "out", {"B"}, kInt64).as<int64_t>();
        launch(sample, args);
      },
      "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "out"_a);

  m.def(
      "softmax_probs",
      [](nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
         nb::handle out_arg) {
        Op op("softmax_probs");
        SampleArgs args = filter_of(op, logits, temperature, top_k, top_p, min_p);
        const Tensor out = op.tensor(out_arg, "out", {"B", "V"}, kFloat32);
        args.probabilities = out.as<float>();
        args.probability_stride = out.stride(0);
        launch(probabilities, args);
      },
      "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "out"_a);

  m.def(
      "log_probs",
      [](nb::handle logits, nb::handle token_ids, nb::handle token_log_probs, nb::handle ranks, nb::handle top_ids_arg,
         nb::handle top_log_probs_arg) {
        Op op("log_probs");
        LogProbArgs args;
        args.logits = logits_of(op, logits);
        const Tensor ids = op.tensor(token_ids, "token_ids", {"B"}, kInt64);
        args.token_ids = tokens_of(op, ids);
        args.token_log_probs = op.tensor(token_log_probs, "token_log_probs", {"B"}, kFloat32).as<float>();
        args.ranks = op.tensor(ranks, "ranks", {"B"}, kInt64).as<int64_t>();
        const Tensor top_ids = op.tensor(top_ids_arg, "top_ids", {"B", "n"}, kInt64);
        const Tensor top_log_probs = op.tensor(top_log_probs_arg, "top_log_probs", {"B", "n"}, kFloat32);
        op.contiguous(top_ids);
        op.contiguous(top_log_probs);
        OP_REQUIRE(
            op, op["n"] <= op["V"],
            "top_n is " + std::to_string(op["n"]) + ", the vocabulary has " + std::to_string(op["V"]) + " tokens");
        args.top_n = op["n"];
        args.top_ids = top_ids.as<int64_t>();
        args.top_log_probs = top_log_probs.as<float>();
        launch(log_probs, args);
      },
      "logits"_a, "token_ids"_a, "token_log_probs"_a, "ranks"_a, "top_ids"_a, "top_log_probs"_a);
}

}  // namespace tilewright
