#include "kernels/embedding/embedding.h"

#include "bindings/checks.h"
#include "bindings/packed.h"
#include "bindings/tensor.h"

namespace tilewright {
namespace {

void in_range(const Op& op, const Tensor& ids, int64_t limit) {
  require_of_results(Ids{op.name(), ids.name, ids.data, ids.dtype, ids.numel(), limit});
}

// The table has `num_rows` rows, those of the tokens from `first` on, of `num_ids` in all.
EmbeddingArgs args_of(const Op& op, const Tensor& ids, const Tensor& out, int64_t num_rows, int64_t first,
                      int64_t num_ids) {
  OP_REQUIRE(op, first >= 0, "first is " + std::to_string(first) + ", expected 0 or more");
  in_range(op, ids, num_ids);
  EmbeddingArgs args;
  args.ids = ids.data;
  args.id_dtype = ids.dtype;
  args.first = first;
  args.num_rows = num_rows;
  args.out = op.rows(out);
  args.count = op["T"];
  args.width = op["D"];
  return args;
}

void embedding_entry(nb::handle ids_arg, nb::handle table_arg, int64_t first, int64_t num_ids, nb::handle out_arg) {
  Op op("embedding");
  const Tensor ids = op.tensor(ids_arg, "ids", {"T"}, one_of({DType::i32, DType::i64}));
  const Tensor table = op.tensor(table_arg, "table", {"V", "D"}, kFloats);
  const Tensor out = op.tensor(out_arg, "out", {"T", "D"}, kFloats);
  op.same_dtype(table, out);
  EmbeddingArgs args = args_of(op, ids, out, op["V"], first, num_ids);
  args.table = op.rows(table);
  launch(embedding, args);
}

void embedding_packed_entry(nb::handle ids_arg, const nb::tuple& table_arg, int64_t first, int64_t num_ids,
                            nb::handle out_arg) {
  Op op("embedding_packed");
  const PackedWeight table = packed_of(op, table_arg, "table", {"_"});
  OP_REQUIRE(op, !table.gated, "the table is packed as gate and up rows, expected a plain packed weight");
  op.bind("D", table.k);
  const Tensor ids = op.tensor(ids_arg, "ids", {"T"}, one_of({DType::i32, DType::i64}));
  const DTypes dtypes = is_quantized(table.format) ? kFloats : one_of({traits_of(table.format).storage});
  const Tensor out = op.tensor(out_arg, "out", {"T", "D"}, dtypes);
  EmbeddingArgs args = args_of(op, ids, out, table.n, first, num_ids);
  args.packed = table;
  launch(embedding, args);
}

void scatter_rows_entry(nb::handle out_arg, nb::handle rows_arg, nb::handle values_arg, bool accumulate) {
  Op op(accumulate ? "scatter_add_rows" : "scatter_rows");
  const Tensor out = op.tensor(out_arg, "out", {"T", "D"}, kFloats);
  const Tensor rows = op.tensor(rows_arg, "rows", {"M"}, one_of({DType::i64}));
  const Tensor values = op.tensor(values_arg, "values", {"M", "D"}, kFloats);
  op.same_dtype(out, values);
  in_range(op, rows, op["T"]);
  ScatterArgs args;
  args.rows = rows.as<int64_t>();
  args.values = op.rows(values);
  args.out = op.rows(out);
  args.count = op["M"];
  args.width = op["D"];
  args.accumulate = accumulate;
  const int64_t repeated = first_repeated(args.rows, args.count, op["T"]);
  OP_REQUIRE(op, repeated < 0,
             "rows[" + std::to_string(repeated) + "] is " + std::to_string(args.rows[repeated]) +
                 ", a row that was named before");
  launch(scatter_rows, args);
}

}  // namespace

void bind_embedding(nb::module_& m) {
  using namespace nb::literals;
  m.def("embedding", &embedding_entry, "ids"_a, "table"_a, "first"_a, "num_ids"_a, "out"_a);
  m.def("embedding_packed", &embedding_packed_entry, "ids"_a, "table"_a, "first"_a, "num_ids"_a, "out"_a);
  m.def("scatter_rows", &scatter_rows_entry, "out"_a, "rows"_a, "values"_a, "accumulate"_a);
}

}  // namespace tilewright
