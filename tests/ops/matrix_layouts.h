#pragma once

// Memory layouts of matrices for the tests of products, and comparisons of matrices.

#include <cmath>
#include <cstring>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/view/view.h>

namespace mica::testing_support {

// A view with x's elements whose last two axes are swapped in memory.
inline Tensor stored_transposed(const Tensor& x) { return transpose(contiguous(transpose(x, -1, -2)), -1, -2); }

// A view with x's elements that begins at the second element of its memory and has gaps between rows.
inline Tensor padded(const Tensor& x) {
  Shape shape = x.shape();
  shape.back() += 3;
  const Tensor base = full(shape, NAN, x.dtype(), x.device());
  const Tensor inside = slice(base, -1, 1, 1 + x.size(-1));
  copy_into(inside, x);
  return inside;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(a).to(Device::cpu());
  const Tensor y = contiguous(b).to(Device::cpu());
  return x.shape() == y.shape() && std::memcmp(x.raw_data(), y.raw_data(), x.bytes()) == 0;
}

}  // namespace mica::testing_support
