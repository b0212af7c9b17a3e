#pragma once

// Images: tensors (N, C, spatial axes…) of one to three spatial axes, as ops/pool and ops/sample compute on them.

#include <cstdint>

#include <mica/core/channels_last.h>
#include <mica/core/half.h>
#include <mica/core/tensor.h>
#include <mica/ops/view/view.h>

namespace mica::images {

/// Where an element is: at position `at` of the spatial axes, after `outer` images and `inner` elements.
struct Place {
  std::int64_t outer;
  int at[3];
  std::int64_t inner;
};

/// How a dense tensor of images lies in memory: as a row-major (outer, sizes…, inner). Row-major, it has N · C outer
/// images and one inner element; channels last, N outer images and C inner elements. Missing spatial axes are the first
/// ones, of size 1.
struct Grid {
  std::int64_t outer;
  int sizes[3];
  std::int64_t inner;

  MICA_HOST_DEVICE std::int64_t plane() const { return std::int64_t{sizes[0]} * sizes[1] * sizes[2]; }
  MICA_HOST_DEVICE std::int64_t flat(int a, int b, int c) const {
    return (std::int64_t{a} * sizes[1] + b) * sizes[2] + c;
  }
  /// The offset of an element in the tensor.
  MICA_HOST_DEVICE std::int64_t offset(std::int64_t image, int a, int b, int c, std::int64_t element) const {
    return (image * plane() + flat(a, b, c)) * inner + element;
  }
  MICA_HOST_DEVICE std::int64_t offset(const Place& p) const {
    return offset(p.outer, p.at[0], p.at[1], p.at[2], p.inner);
  }
};

/// Whether ops compute x channels last: if it is, and is not row-major too.
bool is_last(const Tensor& x);
/// x in that layout (else row-major): itself or a copy. No history.
Tensor in_layout(const Tensor& x, bool channels_last);
/// A new tensor in that layout.
Tensor empty_images(const Shape& shape, DType dtype, Device device, bool channels_last);

/// The grid of a tensor in that layout. Throws an Error that names `op` if a size does not fit in 31 bits.
Grid grid_of(const Tensor& x, bool channels_last, const char* op);

/// One number for each of the spatial axes. Throws an Error that names `op` and the option unless `given` has one
/// number or `axes`, all between `least` and 2³¹ − 1.
Dims of_axes(const char* op, const char* option, const Dims& given, int axes, std::int64_t least);

/// Calls f with x as (N, C, spatial axes…). If x lacks N, removes this axis from the result.
template <class F>
Tensor with_batch(const Tensor& x, int axes, const F& f) {
  return x.dim() == axes + 2 ? f(x) : squeeze(f(unsqueeze(x, 0)), 0);
}

/// Throws an Error that names `op` unless x is floating and has the shape (N, C, spatial axes…), or without N, for this
/// number of spatial axes, of which no size but N is 0.
void check_images(const char* op, const Tensor& x, int axes);

}  // namespace mica::images
