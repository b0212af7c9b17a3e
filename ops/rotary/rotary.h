#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>

namespace mica {

struct RotaryOptions {
  std::int64_t offset = 0;  ///< row t has position offset + t, unless `positions` is given
  Tensor positions{};       ///< each row's position, int64 or int32: (T), or x's shape without its last two axes
  double scale = 1;         ///< multiplies the result
};

/// Rotary position embedding: rotates each pair of columns (j, j + D/2) of every head by position · frequencies[j].
///
///   y[j]       = scale · (x[j] cos a − x[j + D/2] sin a)
///   y[j + D/2] = scale · (x[j + D/2] cos a + x[j] sin a)      a = position · frequencies[j], in float32
///
/// @param x (…, T, H, D), floating, any strides: T rows of H heads of even width D, at most 512.
/// @param frequencies D/2 angles in radians per position: see nn::rotary_frequencies.
/// @return y, of x's shape and dtype, row-major. Differentiable in x any number of times: the gradient is rotated by
///         −a. 16-bit floats are computed in float32 and rounded once.
///
/// Throws Error before anything is computed if a shape, dtype or device does not match.
///
/// Su et al., RoFormer, 2021, arXiv:2104.09864; pairs are (j, j + D/2), as in Hugging Face's Llama, not (2j, 2j + 1).
Tensor rotary(const Tensor& x, const std::vector<float>& frequencies, const RotaryOptions& options = {});

}  // namespace mica
