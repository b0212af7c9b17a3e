#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// `count` numbers from start to end, both included, at equal distances; for one number, start. They are computed in
/// float64, from the nearer end, then converted to the dtype; integers are rounded towards 0. Throws if count < 0, or
/// if a bound is not finite or not representable in the dtype.
Tensor linspace(double start, double end, std::int64_t count, DType dtype = float32, Device device = Device::cpu());

/// `base` to the powers linspace(start, end, count). For integer dtypes, throws unless base > 0.
Tensor logspace(double start, double end, std::int64_t count, double base = 10, DType dtype = float32,
                Device device = Device::cpu());

/// The identity matrix (rows, columns): ones on the main diagonal, zeros elsewhere. Without `columns`, it is square.
/// Throws if a size is negative.
Tensor eye(std::int64_t rows, std::int64_t columns, DType dtype = float32, Device device = Device::cpu());
Tensor eye(std::int64_t rows, DType dtype = float32, Device device = Device::cpu());

/// For n tensors of one axis, or scalars, with lengths s₁ … sₙ: n tensors of shape (s₁, …, sₙ), which have the elements
/// of tensor i along axis i, and are constant along the others (PyTorch's indexing "ij"). They are views. Throws if
/// there are no tensors, or if their dtypes or devices differ.
Tensors meshgrid(const Tensors& tensors);

}  // namespace mica
