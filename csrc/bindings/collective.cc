#include "parallel/collective.h"

#include <nanobind/stl/string.h>

#include <system_error>

#include "bindings/tensor.h"
#include "kernels/reduce/reduce.h"
#include "parallel/waiting.h"

namespace tilewright {
namespace {

constexpr DTypes kAny =
    one_of({DType::f32, DType::bf16, DType::u8, DType::i32, DType::i64, DType::boolean, DType::f64});

// A whole tensor of any shape: collectives treat it as flat memory.
Tensor whole(Op& op, nb::handle capsule, const char* name, DTypes dtypes) {
  const Tensor t = op.tensor(capsule, name, {"..."}, dtypes);
  op.contiguous(t);
  return t;
}

void same_size(const Op& op, const Tensor& x, const Tensor& out) {
  OP_REQUIRE(op, x.numel() == out.numel(),
             std::string(out.name) + " is " + to_string(out) + ", expected as many elements as " + x.name + ", " +
                 to_string(x));
}

// Sums of float32 may be rounded to bfloat16 when written to `out`; otherwise it has the type of x.
void takes_sums(const Op& op, const Tensor& x, const Tensor& out) {
  OP_REQUIRE(op, out.dtype == x.dtype || x.dtype == DType::f32,
             std::string(out.name) + " is " + to_string(out) + ", expected bfloat16 as x is, " + to_string(x));
}

// Returns the group of a call; a plan that records the call keeps it alive.
SharedGroup* group_of(nb::handle group) {
  if (Plan* plan = Plan::recording()) plan->keep(group);
  return nb::cast<SharedGroup*>(group);
}

// Errors of the system are OSErrors with their number, as Python's own calls raise.
void raise_os_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
  }
}

// For ranks that sleep in a call: runs pending signal handlers. If one raises, the call ends.
void check_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void bind_reductions(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "all_reduce",
      [](nb::handle group, nb::handle x_arg, nb::handle out_arg) {
        Op op("all_reduce");
        const Tensor x = whole(op, x_arg, "x", kFloats);
        const Tensor out = whole(op, out_arg, "out", kFloats);
        op.same_dtype(x, out);
        same_size(op, x, out);
        launch(all_reduce, AllReduceArgs{group_of(group), x.data, out.data, x.numel(), x.dtype});
      },
      "group"_a, "x"_a, "out"_a);

  m.def(
      "reduce_scatter",
      [](nb::handle group_arg, nb::handle x_arg, nb::handle out_arg) {
        Op op("reduce_scatter");
        const Tensor x = whole(op, x_arg, "x", kFloats);
        const Tensor out = whole(op, out_arg, "out", kFloats);
        SharedGroup* group = group_of(group_arg);
        op.same_dtype(x, out);
        OP_REQUIRE(op, x.numel() == group->size() * out.numel(),
                   "x is " + to_string(x) + " and out " + to_string(out) + ", expected x to be " +
                       std::to_string(group->size()) + " times out, a part per rank");
        launch(reduce_scatter, ReduceScatterArgs{group, x.data, out.data, out.numel(), x.dtype});
      },
      "group"_a, "x"_a, "out"_a);

  // Computes the sum of the `num_parts` equal parts of x, in order, + addend: a reduction over ranks.
  m.def(
      "reduce",
      [](nb::handle x_arg, int num_parts, nb::handle addend_arg, nb::handle out_arg) {
        Op op("reduce");
        const Tensor x = whole(op, x_arg, "x", kFloats);
        const Tensor addend = op.optional(addend_arg, "addend", {"..."}, kFloats);
        const Tensor out = whole(op, out_arg, "out", kFloats);
        OP_REQUIRE(op, num_parts >= 1 && num_parts <= kMaxSummands && x.numel() == num_parts * out.numel(),
                   "x is " + to_string(x) + " and out " + to_string(out) + ", expected x to be " +
                       std::to_string(num_parts) + " times out");
        takes_sums(op, x, out);
        if (addend) {
          op.contiguous(addend);
          op.same_dtype(out, addend);
          same_size(op, out, addend);
        }
        ReduceArgs args;
        args.num_summands = num_parts;
        const int64_t part_bytes = out.numel() * static_cast<int64_t>(size_of(x.dtype));
        for (int part = 0; part < num_parts; ++part) args.x[part] = x.as<char>() + part * part_bytes;
        args.addend = addend.data;
        args.out = out.data;
        args.count = out.numel();
        args.x_dtype = x.dtype;
        args.dtype = out.dtype;
        launch(static_cast<void (*)(const ReduceArgs&)>(reduce), args);
      },
      "x"_a, "num_parts"_a, "addend"_a.none(), "out"_a);
}

void bind_residual_reductions(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "all_reduce_add",
      [](nb::handle group, nb::handle x_arg, nb::handle residual_arg, nb::handle out_arg) {
        Op op("all_reduce_add");
        const Tensor x = whole(op, x_arg, "x", kFloats);
        const Tensor residual = whole(op, residual_arg, "residual", kFloats);
        const Tensor out = whole(op, out_arg, "out", kFloats);
        same_size(op, x, residual);
        takes_sums(op, x, residual);
        op.same_dtype(residual, out);
        same_size(op, residual, out);
        launch(all_reduce_add,
               AllReduceAddArgs{group_of(group), x.data, residual.data, out.data, x.numel(), x.dtype, residual.dtype});
      },
      "group"_a, "x"_a, "residual"_a, "out"_a);

  m.def(
      "all_reduce_norm",
      [](nb::handle group, nb::handle x_arg, nb::handle residual_arg, nb::handle weight_arg, nb::handle out_arg,
         float eps, bool weight_plus_one) {
        Op op("all_reduce_norm");
        const Tensor x = op.tensor(x_arg, "x", {"...", "D"}, kFloats);
        const Tensor residual = whole(op, residual_arg, "residual", kFloats);
        const Tensor weight = op.tensor(weight_arg, "weight", {"D"}, kFloats);
        const Tensor out = whole(op, out_arg, "out", kFloats);
        op.contiguous(x);
        same_size(op, x, residual);
        takes_sums(op, x, residual);
        op.same_dtype(residual, out);
        same_size(op, residual, out);
        AllReduceNormArgs args;
        args.group = group_of(group);
        args.width = op["D"];
        const int64_t max_width = max_norm_width(*args.group, x.dtype);
        OP_REQUIRE(op, args.width >= 1 && args.width <= max_width,
                   "x is " + to_string(x) + ", expected rows of 1 to " + std::to_string(max_width) + " elements");
        args.x = x.data;
        args.residual = residual.data;
        args.out = out.data;
        args.weight = weight.data;
        args.rows = x.numel() / args.width;
        args.eps = eps;
        args.weight_plus_one = weight_plus_one;
        args.x_dtype = x.dtype;
        args.dtype = residual.dtype;
        args.weight_dtype = weight.dtype;
        launch(all_reduce_norm, args);
      },
      "group"_a, "x"_a, "residual"_a, "weight"_a, "out"_a, "eps"_a, "weight_plus_one"_a);
}

// Columns of all ranks, concatenated, without the last ones if `out` is narrower.
void fits_columns(const Op& op, const Tensor& x, const Tensor& out, int num_ranks) {
  const int64_t width = num_ranks * x.size(-1);
  OP_REQUIRE(op, op.num_rows(out) == op.num_rows(x) && out.size(-1) <= width,
             "x is " + to_string(x) + " and out " + to_string(out) + ", expected out to have " +
                 std::to_string(op.num_rows(x)) + " rows of at most " + std::to_string(width) + " columns, " +
                 std::to_string(x.size(-1)) + " per rank");
}

void bind_copies(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "all_gather",
      [](nb::handle group_arg, nb::handle x_arg, nb::handle out_arg) {
        Op op("all_gather");
        const Tensor x = whole(op, x_arg, "x", kAny);
        const Tensor out = whole(op, out_arg, "out", kAny);
        SharedGroup* group = group_of(group_arg);
        op.same_dtype(x, out);
        OP_REQUIRE(op, out.numel() == group->size() * x.numel(),
                   "x is " + to_string(x) + " and out " + to_string(out) + ", expected out to be " +
                       std::to_string(group->size()) + " times x, a part per rank");
        launch(all_gather,
               AllGatherArgs{
                   group, {x.data, x.numel(), x.dtype}, {out.data, out.numel(), out.dtype}, 1, x.numel(), out.numel()});
      },
      "group"_a, "x"_a, "out"_a);

  m.def(
      "all_gather_columns",
      [](nb::handle group_arg, nb::handle x_arg, nb::handle out_arg) {
        Op op("all_gather");
        const Tensor x = op.tensor(x_arg, "x", {"...", "D"}, kAny);
        const Tensor out = op.tensor(out_arg, "out", {"...", "_"}, kAny);
        SharedGroup* group = group_of(group_arg);
        op.same_dtype(x, out);
        fits_columns(op, x, out, group->size());
        launch(all_gather, AllGatherArgs{group, op.rows(x), op.rows(out), op.num_rows(x), op["D"], out.size(-1)});
      },
      "group"_a, "x"_a, "out"_a);

  m.def(
      "copy_rows",
      [](nb::handle x_arg, nb::handle out_arg) {
        Op op("copy_rows");
        const Tensor x = op.tensor(x_arg, "x", {"...", "D"}, kAny);
        const Tensor out = op.tensor(out_arg, "out", {"...", "_"}, kAny);
        op.same_dtype(x, out);
        fits_columns(op, x, out, 1);
        launch(copy_rows, CopyRowsArgs{op.rows(x), op.rows(out), op.num_rows(x), out.size(-1)});
      },
      "x"_a, "out"_a);

  m.def(
      "broadcast",
      [](nb::handle group_arg, nb::handle x_arg, int root) {
        Op op("broadcast");
        const Tensor x = whole(op, x_arg, "x", kAny);
        SharedGroup* group = group_of(group_arg);
        OP_REQUIRE(op, root >= 0 && root < group->size(),
                   "root is " + std::to_string(root) + ", expected 0 to " + std::to_string(group->size() - 1));
        launch(broadcast, BroadcastArgs{group, x.data, x.numel(), root, x.dtype});
      },
      "group"_a, "x"_a, "root"_a);

  m.def("barrier", [](nb::handle group) { launch(barrier, BarrierArgs{group_of(group)}); }, "group"_a);
}

}  // namespace

void bind_collective(nb::module_& m) {
  using namespace nb::literals;
  nb::register_exception_translator(raise_os_error);
  nb::exception<CollectiveError>(m, "CollectiveError", PyExc_RuntimeError);
  m.attr("max_ranks") = kMaxRanks;
  m.attr("default_slot_bytes") = kDefaultSlotBytes;
  // Whether a plan is recorded, which would miss a collective that is not a kernel call.
  m.def("is_recording", [] { return Plan::recording() != nullptr; });
  m.def("create_segment", &Segment::create, "num_ranks"_a, "slot_bytes"_a);
  m.def(
      "abort_group",
      [](int fd, int rank) {
        Segment segment(fd);
        abort_group(segment, rank);
      },
      "fd"_a, "rank"_a);
  nb::class_<SharedGroup>(m, "SharedGroup")
      .def(nb::init<int, int, std::string, double>(), "fd"_a, "rank"_a, "name"_a, "timeout_s"_a)
      .def_prop_ro("rank", &SharedGroup::rank)
      .def_prop_ro("size", &SharedGroup::size)
      .def("post", &SharedGroup::post)
      .def("wait_for_post", &SharedGroup::wait_for_post, "spin_us"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &SharedGroup::close, nb::call_guard<nb::gil_scoped_release>());
  set_signal_check(check_signals);
  bind_reductions(m);
  bind_residual_reductions(m);
  bind_copies(m);
}

}  // namespace tilewright
