#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Operations on the bits of integers, element by element. Two tensors have the same dtype and device, and their shapes
// broadcast; a number must be one that the tensor's dtype can represent. Not differentiable.

/// For integers and bool.
Tensor bitwise_not(const Tensor& a);
Tensor bitwise_and(const Tensor& a, const Tensor& b);
Tensor bitwise_and(const Tensor& a, double b);
Tensor bitwise_or(const Tensor& a, const Tensor& b);
Tensor bitwise_or(const Tensor& a, double b);
Tensor bitwise_xor(const Tensor& a, const Tensor& b);
Tensor bitwise_xor(const Tensor& a, double b);

/// a · 2ᵇ, where bits that the dtype does not have are lost, and a / 2ᵇ rounded down. For integers. A shift by more
/// bits than the dtype has, or by a negative number, gives 0, except that a negative number shifted to the right gives
/// −1.
Tensor bitwise_left_shift(const Tensor& a, const Tensor& b);
Tensor bitwise_left_shift(const Tensor& a, double b);
Tensor bitwise_right_shift(const Tensor& a, const Tensor& b);
Tensor bitwise_right_shift(const Tensor& a, double b);

}  // namespace mica
