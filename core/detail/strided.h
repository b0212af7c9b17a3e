#pragma once

#include <array>

#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica {

/// An operand of an element-wise kernel: a tensor, or a scalar.
struct Operand {
  const Tensor* tensor = nullptr;  // null: use `scalar`
  double scalar = 0;

  Operand(const Tensor& x) : tensor(&x) {}
  explicit Operand(const Tensor* x) : tensor(x) {}
  Operand(double value) : scalar(value) {}
};

/// What an element-wise function with N outputs returns for one element.
template <class T, int N>
struct Results {
  T at[N];
};

/// Result k of an element-wise function that returned Results, or a number (k = 0).
template <class S>
MICA_HOST_DEVICE const S& result_of(const S& returned, int) {
  return returned;
}
template <class S, int N>
MICA_HOST_DEVICE const S& result_of(const Results<S, N>& returned, int k) {
  return returned.at[k];
}

/// The first output that is not null. At least one must not be.
template <std::size_t N>
const Tensor* first_output(const std::array<const Tensor*, N>& outs) {
  std::size_t k = 0;
  while (k + 1 < N && outs[k] == nullptr) {
    ++k;
  }
  return outs[k];
}

/// The axes of x from the outermost in memory to the innermost, so that a loop in this order writes x sequentially.
/// Empty if that is the row-major order.
inline Dims memory_order(const Tensor& x) {
  Dims order;
  for (int axis = 0; axis < x.dim() && !x.is_contiguous(); ++axis) {
    int at = axis;
    while (at > 0 && x.strides()[static_cast<int>(order[at - 1])] < x.strides()[axis]) {
      --at;
    }
    order.insert(at, axis);
  }
  return order;
}

/// The loop over N tensors of a common shape. Holds the sizes and strides (in elements) after removing axes of length 1
/// and merging neighboring axes where possible; tensors that are dense in the loop's order become one axis.
template <int N>
struct StridedLoop {
  int rank = 0;
  std::int64_t numel = 0;
  std::array<std::int64_t, kMaxRank> sizes{};
  std::array<std::array<std::int64_t, kMaxRank>, N> strides{};

  /// Every tensor must broadcast to `shape`. Null is a scalar, with strides 0. `order` has the axes, outermost first;
  /// empty: row-major.
  StridedLoop(const Shape& shape, const std::array<const Tensor*, N>& tensors, const Dims& order = {})
      : numel(numel_of(shape)) {
    for (int i = 0; i < shape.size(); ++i) {
      const int axis = order.empty() ? i : static_cast<int>(order[i]);
      if (shape[axis] == 1) {
        continue;
      }
      std::array<std::int64_t, N> step{};
      for (int t = 0; t < N; ++t) {
        if (tensors[t] != nullptr) {
          const Tensor& x = *tensors[t];
          const int own = axis - (shape.size() - x.dim());
          step[t] = own < 0 || x.shape()[own] == 1 ? 0 : x.strides()[own];
        }
      }
      bool merge = rank > 0;
      for (int t = 0; t < N && merge; ++t) {
        merge = strides[t][rank - 1] == step[t] * shape[axis];
      }
      rank += merge ? 0 : 1;
      sizes[rank - 1] = (merge ? sizes[rank - 1] : 1) * shape[axis];
      for (int t = 0; t < N; ++t) {
        strides[t][rank - 1] = step[t];
      }
    }
    if (rank == 0) {  // a single element
      rank = 1;
      sizes[0] = 1;
    }
  }

  std::int64_t inner_size() const { return sizes[rank - 1]; }
  std::int64_t inner_stride(int t) const { return strides[t][rank - 1]; }
};

}  // namespace mica
