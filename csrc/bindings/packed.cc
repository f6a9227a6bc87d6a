#include "bindings/packed.h"

#include "kernels/linear/linear.h"

namespace tilewright {
namespace {

// Returns tiles, which every level reads, or `own`, the layout in which this level keeps weights of the format.
WeightLayout layout_named(const Op& op, const std::string& name, WeightLayout own) {
  if (name == name_of(own)) return own;
  OP_REQUIRE(op, name == name_of(WeightLayout::tiles),
             "the weight's layout is '" + name + "', this level reads '" + name_of(own) + "'");
  return WeightLayout::tiles;
}

void require_groups(const Op& op, const PackedWeight& weight) {
  const std::string format = name_of(weight.format),
                    has = std::string("the weight has groups of ") + std::to_string(weight.group_size) + " values, ";
  if (!is_quantized(weight.format)) {
    OP_REQUIRE(op, weight.group_size == 0, has + format + " has none");
    return;
  }
  std::string known;
  for (const int64_t size : kGroupSizes)
    if (has_groups_of(weight.format, size)) known += (known.empty() ? "" : ", ") + std::to_string(size);
  OP_REQUIRE(op, has_groups_of(weight.format, weight.group_size),
             has + format + " has those of " + known + (has_groups_of(weight.format, 0) ? " or whole rows" : ""));
  OP_REQUIRE(op, weight.k <= kMaxQuantizedDepth,
             "a row of the weight has " + std::to_string(weight.k) + " values, " + format + " takes up to " +
                 std::to_string(kMaxQuantizedDepth));
}

// Returns the scales of a weight whose sizes are those of its data.
void* scales_of(Op& op, nb::handle arg, const PackedWeight& weight, const Tensor& data, const char* name) {
  if (!is_quantized(weight.format)) {
    OP_REQUIRE(op, arg.is_none(), std::string(name) + " has scales, " + name_of(weight.format) + " has none");
    return nullptr;
  }
  OP_REQUIRE(op, !arg.is_none(), std::string(name) + " has no scales, which " + name_of(weight.format) + " needs");
  const DTypes dtypes = one_of({weight.scale_dtype()});
  const Tensor scales =
      data.rank == 2 ? op.tensor(arg, "scales", {"E", "_"}, dtypes) : op.tensor(arg, "scales", {"_"}, dtypes);
  OP_REQUIRE(op, scales.size(-1) == weight.num_scales(),
             std::string(name) + " has " + std::to_string(scales.size(-1)) + " scales, expected " +
                 std::to_string(weight.num_scales()));
  op.contiguous(scales);
  return scales.data;
}

}  // namespace

std::string to_string(const PackedWeight& weight) {
  return std::string(weight.gated ? "gated " : "") + "[" + std::to_string(weight.n) + ", " + std::to_string(weight.k) +
         "]";
}

WeightFormat format_named(const Op& op, const std::string& name) {
  std::string known;
  for (const WeightTraits& traits : kWeightTraits) {
    if (name == traits.name) return traits.format;
    known += std::string(known.empty() ? "" : ", ") + traits.name;
  }
  op.fail("the weight's format is '" + name + "', expected one of " + known);
}

PackedWeight described_by(const Op& op, nb::handle form) {
  const nb::object format = form.attr("format");
  PackedWeight weight;
  weight.format = format_named(op, nb::cast<std::string>(format.attr("name")));
  weight.n = nb::cast<int64_t>(form.attr("n"));
  weight.k = nb::cast<int64_t>(form.attr("k"));
  weight.gated = nb::cast<bool>(form.attr("gated"));
  weight.group_size = nb::cast<int64_t>(format.attr("group_size"));
  weight.layout = layout_named(op, nb::cast<std::string>(format.attr("layout")), layout_of(weight.format));
  require_groups(op, weight);
  OP_REQUIRE(op, weight.n > 0 && weight.k > 0,
             "a packed weight of " + std::to_string(weight.n) + " x " + std::to_string(weight.k) + " has no elements");
  OP_REQUIRE(op, !weight.gated || weight.n % 2 == 0,
             "a gate|up weight has an even number of rows, got " + std::to_string(weight.n));
  return weight;
}

PackedWeight packed_of(Op& op, const nb::tuple& packed, const char* name, std::initializer_list<const char*> sizes) {
  OP_REQUIRE(op, packed.size() == 3, std::string(name) + " must be a tensor, its form and its scales or None");
  const Tensor data = op.tensor(packed[0], name, sizes, kFloats | one_of({DType::u8}));
  PackedWeight weight = described_by(op, packed[1]);
  OP_REQUIRE(op, data.dtype == traits_of(weight.format).storage,
             std::string(name) + " is " + name_of(data.dtype) + ", its format " + name_of(weight.format));
  OP_REQUIRE(op, data.size(-1) == weight.elements(),
             std::string(name) + " has " + std::to_string(data.size(-1)) + " elements" +
                 (data.rank == 2 ? " per expert" : "") + ", expected " + std::to_string(weight.elements()) +
                 " for a packed " + name + " of " + std::to_string(weight.n) + " by " + std::to_string(weight.k));
  op.contiguous(data);
  weight.data = data.data;
  weight.scales = scales_of(op, packed[2], weight, data, name);
  return weight;
}

}  // namespace tilewright
