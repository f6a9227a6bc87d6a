// Tensors passed from Python, and the checks that guard every kernel.
//
// A tensor is passed as the DLPack capsule of torch.utils.dlpack.to_dlpack: 0.3 us, against 4 us for the __dlpack__
// protocol. The capsule is only read; Python owns it and frees it after the call.
//
//   Op op("rms_norm");
//   const Tensor x = op.tensor(x_arg, "x", {"T", "D"}, kFloats);
//   const Tensor w = op.tensor(w_arg, "weight", {"D"}, kFloats);   // D must agree, or ValueError says so
//   kernel(x.data, op["T"], op["D"]);
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/activation.h"
#include "base/dtype.h"
#include "base/rows.h"
#include "bindings/plan.h"

namespace tilewright {

namespace nb = nanobind;

inline constexpr int kMaxRank = 8;

// A bit per DType.
using DTypes = unsigned;
constexpr DTypes one_of(std::initializer_list<DType> dtypes) {
  DTypes set = 0;
  for (DType dtype : dtypes) set |= 1u << static_cast<int>(dtype);
  return set;
}
inline constexpr DTypes kFloats = one_of({DType::f32, DType::bf16});

struct Tensor {
  const char* name = "";
  void* data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in elements; those of axes of length 1 are made up to fit

  explicit operator bool() const { return data != nullptr || rank > 0; }
  int64_t size(int axis) const { return shape[axis < 0 ? rank + axis : axis]; }
  int64_t stride(int axis) const { return strides[axis < 0 ? rank + axis : axis]; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[i];
    return count;
  }
};

// Raises ValueError "<op>: <message>" unless the condition holds. A macro, so that the message is built only when it is
// needed: a call may check a thousand slots or pages.
#define OP_REQUIRE(op, condition, message) \
  do {                                     \
    if (!(condition)) (op).fail(message);  \
  } while (false)

// One call of one op: reads its tensors and binds the symbolic sizes among them.
class Op {
 public:
  explicit Op(const char* name) : name_(name) {}
  const char* name() const { return name_; }

  // Returns a tensor whose axes have the given sizes: a symbol ("T"; the first use binds it, later ones must agree), a
  // number ("3"), "_" for any, or a leading "..." for any number of axes. Its last axis must be contiguous.
  Tensor tensor(nb::handle capsule, const char* name, std::initializer_list<const char*> sizes, DTypes dtypes);
  // Returns the same, or an empty Tensor for None.
  Tensor optional(nb::handle capsule, const char* name, std::initializer_list<const char*> sizes, DTypes dtypes);

  int64_t operator[](const char* symbol) const;
  void bind(const char* symbol, int64_t size);

  // Returns the common stride of x's rows when all axes but the last `inner` are flattened. Raises if there is none (a
  // transposed or sliced middle axis).
  int64_t row_stride(const Tensor& x, int inner = 1) const;
  int64_t num_rows(const Tensor& x, int inner = 1) const;

  // Returns a tensor as a kernel argument; nothing for an empty one. All axes but the last are rows, all but the last
  // two tokens of heads (of one head if there are no more than two).
  Rows rows(const Tensor& x) const { return x ? Rows{x.data, row_stride(x), x.dtype} : Rows{}; }
  Heads heads(const Tensor& x) const {
    if (!x) return {};
    const bool per_head = x.rank >= 3;
    return {x.data, row_stride(x, per_head ? 2 : 1), per_head ? x.stride(-2) : 0, x.dtype};
  }

  void same_dtype(const Tensor& a, const Tensor& b) const;
  void contiguous(const Tensor& x) const;
  // Raises ValueError "<op>: <message>"; see OP_REQUIRE.
  [[noreturn]] void fail(const std::string& message) const;

 private:
  const char* name_;
  std::vector<std::pair<std::string, int64_t>> sizes_;
};

// Returns the activation of that name; ValueError with the known ones otherwise.
Activation activation_named(const Op& op, const std::string& name);

std::string to_string(const Tensor& tensor);  // "float32 [3, 4]"

// Runs a kernel without the interpreter lock, so that other Python threads can run. If the thread records a plan, the
// call is added to it.
template <class Args>
void launch(void (*kernel)(const Args&), const Args& args) {
  if (Plan* plan = Plan::recording()) plan->add(kernel, args);
  nb::gil_scoped_release release;
  kernel(args);
}

// One per file of csrc/bindings.
void bind_attention(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_gated_delta(nb::module_& m);
void bind_conv(nb::module_& m);
void bind_conv3d(nb::module_& m);
void bind_norm(nb::module_& m);
void bind_group_norm(nb::module_& m);
void bind_ada_norm(nb::module_& m);
void bind_activation(nb::module_& m);
void bind_embedding(nb::module_& m);
void bind_rope(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_image(nb::module_& m);
void bind_mel(nb::module_& m);
void bind_sample(nb::module_& m);
void bind_collective(nb::module_& m);
void bind_plan(nb::module_& m);

}  // namespace tilewright
