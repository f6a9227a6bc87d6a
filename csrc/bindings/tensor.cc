#include "bindings/tensor.h"

#include <cstring>
#include <stdexcept>

namespace tilewright {
namespace {

// The part of DLPack's ABI (version 0.x, capsule name "dltensor") that is read here.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

constexpr int kDlCpu = 1;

bool dtype_from(const DlTensor& t, DType* dtype) {
  if (t.dtype_lanes != 1) return false;
  const int code = t.dtype_code, bits = t.dtype_bits;
  enum { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
  if (code == kFloat && bits == 32) return *dtype = DType::f32, true;
  if (code == kFloat && bits == 16) return *dtype = DType::f16, true;
  if (code == kFloat && bits == 64) return *dtype = DType::f64, true;
  if (code == kBfloat && bits == 16) return *dtype = DType::bf16, true;
  if (code == kUint && bits == 8) return *dtype = DType::u8, true;
  if (code == kInt && bits == 32) return *dtype = DType::i32, true;
  if (code == kInt && bits == 64) return *dtype = DType::i64, true;
  if (code == kBool && bits == 8) return *dtype = DType::boolean, true;
  return false;
}

std::string list_of(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string list_of(DTypes dtypes) {
  std::string text;
  for (int i = 0; i <= static_cast<int>(DType::f16); ++i)
    if (dtypes >> i & 1) text += (text.empty() ? "" : " or ") + std::string(name_of(static_cast<DType>(i)));
  return text;
}

bool is_number(const char* size) { return *size >= '0' && *size <= '9'; }

}  // namespace

std::string to_string(const Tensor& tensor) {
  return std::string(name_of(tensor.dtype)) + " " + list_of(tensor.shape, tensor.rank);
}

Activation activation_named(const Op& op, const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumActivations; ++i) {
    const auto candidate = static_cast<Activation>(i);
    if (name == name_of(candidate)) return candidate;
    known += std::string(i ? ", " : "") + name_of(candidate);
  }
  OP_REQUIRE(op, false, "activation is '" + name + "', expected one of " + known);
  return Activation::none;
}

void Op::fail(const std::string& message) const {
  throw nb::value_error((std::string(name_) + ": " + message).c_str());
}

int64_t Op::operator[](const char* symbol) const {
  for (const auto& [name, size] : sizes_)
    if (name == symbol) return size;
  throw std::logic_error(std::string(name_) + ": no size named " + symbol);
}

void Op::bind(const char* symbol, int64_t size) { sizes_.emplace_back(symbol, size); }

Tensor Op::optional(nb::handle capsule, const char* name, std::initializer_list<const char*> sizes, DTypes dtypes) {
  if (capsule.is_none()) return {};
  return tensor(capsule, name, sizes, dtypes);
}

Tensor Op::tensor(nb::handle capsule, const char* name, std::initializer_list<const char*> sizes, DTypes dtypes) {
  auto* dl = static_cast<DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!dl) {
    PyErr_Clear();
    throw nb::type_error((std::string(name_) + ": " + name + " must be a tensor").c_str());
  }
  if (Plan* plan = Plan::recording()) plan->keep(capsule);
  Tensor t;
  t.name = name;
  t.rank = dl->ndim;
  OP_REQUIRE(*this, t.rank <= kMaxRank,
             std::string(name) + " has " + std::to_string(t.rank) + " axes, at most 8 are taken");
  int64_t packed_stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = dl->shape[i];
    t.strides[i] = dl->strides && t.shape[i] != 1 ? dl->strides[i] : packed_stride;
    packed_stride = t.strides[i] * t.shape[i];
  }
  OP_REQUIRE(*this, dl->device_type == kDlCpu, std::string(name) + " is not on the CPU");
  OP_REQUIRE(*this, dtype_from(*dl, &t.dtype) && (dtypes >> static_cast<int>(t.dtype) & 1),
             std::string(name) + " is " + (dtype_from(*dl, &t.dtype) ? name_of(t.dtype) : "of an unsupported type") +
                 ", expected " + list_of(dtypes));
  t.data = static_cast<char*>(dl->data) + dl->byte_offset;

  const bool open = sizes.size() && std::strcmp(*sizes.begin(), "...") == 0;
  const int named = static_cast<int>(sizes.size()) - open;
  std::string expected = "[";
  bool fits = open ? t.rank >= named : t.rank == named;
  int axis = fits ? t.rank - named : 0;
  for (const char* size : sizes) {
    expected += expected.size() > 1 ? ", " : "";
    expected += size;
    if (size[0] == '.' || size[0] == '_') {
      axis += size[0] == '_';
      continue;
    }
    if (is_number(size)) {
      if (fits && t.shape[axis] != std::stoll(size)) fits = false;
    } else {
      const auto* bound = [&]() -> const std::pair<std::string, int64_t>* {
        for (const auto& entry : sizes_)
          if (entry.first == size) return &entry;
        return nullptr;
      }();
      if (bound) {
        expected += "=" + std::to_string(bound->second);
        if (fits && t.shape[axis] != bound->second) fits = false;
      } else if (fits) {
        sizes_.emplace_back(size, t.shape[axis]);
      }
    }
    ++axis;
  }
  OP_REQUIRE(*this, fits,
             std::string(name) + " has shape " + list_of(t.shape, t.rank) + ", expected " + expected + "]");
  OP_REQUIRE(*this, t.rank == 0 || t.strides[t.rank - 1] == 1 || t.numel() == 0,
             std::string(name) + " has strides " + list_of(t.strides, t.rank) + ", its last axis must be contiguous");
  return t;
}

int64_t Op::num_rows(const Tensor& x, int inner) const {
  int64_t rows = 1;
  for (int i = 0; i < x.rank - inner; ++i) rows *= x.shape[i];
  return rows;
}

int64_t Op::row_stride(const Tensor& x, int inner) const {
  const int outer = x.rank - inner;
  if (outer <= 0 || x.numel() == 0) return 0;
  int64_t stride = 0, expected = 0;  // of the innermost outer axis longer than 1; of the next one
  for (int i = outer - 1; i >= 0; --i) {
    if (x.shape[i] == 1) continue;
    if (!stride) {
      stride = x.strides[i];
    } else if (x.strides[i] != expected) {
      fail(std::string(x.name) + " has strides " + list_of(x.strides, x.rank) + " for shape " +
           list_of(x.shape, x.rank) + ": its leading axes do not form evenly spaced rows; call .contiguous()");
    }
    expected = x.strides[i] * x.shape[i];
  }
  return stride;
}

void Op::same_dtype(const Tensor& a, const Tensor& b) const {
  OP_REQUIRE(*this, a.dtype == b.dtype,
             std::string(b.name) + " is " + name_of(b.dtype) + ", expected " + name_of(a.dtype) + " as " + a.name);
}

void Op::contiguous(const Tensor& x) const {
  int64_t expected = 1;
  for (int i = x.rank - 1; i >= 0; --i) {
    OP_REQUIRE(*this, x.strides[i] == expected || x.shape[i] == 1 || x.numel() == 0,
               std::string(x.name) + " has strides " + list_of(x.strides, x.rank) + " for shape " +
                   list_of(x.shape, x.rank) + ", it must be contiguous");
    expected *= x.shape[i];
  }
}

}  // namespace tilewright
