#pragma once

// Code shared by the kernels of tiled_matmul.

#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/ops/gemm/detail/operand_layout.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_kernels.h>

namespace mica::kernels::tiles {

using cuda::Lines;
using gemm::OperandLayout;

/// Calls f.operator()<kA, kB>() with the directions of the lines of a and b: along K, or along the rows of a and the
/// columns of b.
template <class F>
void on_lines(const OperandLayout& a, const OperandLayout& b, const F& f) {
  if (a.lines_are_rows) {
    b.lines_are_rows ? f.template operator()<Lines::depth, Lines::rows>()
                     : f.template operator()<Lines::depth, Lines::depth>();
  } else {
    b.lines_are_rows ? f.template operator()<Lines::rows, Lines::rows>()
                     : f.template operator()<Lines::rows, Lines::depth>();
  }
}

/// The slope for z ≤ 0; 1 without an activation.
inline double slope_of(Activation activation) { return activation == Activation::leaky_relu ? kLeakySlope : 1; }

template <class T>
__device__ T leaky(T z, T slope) {
  return z > T{0} ? z : z * slope;
}

/// Whether the kernel for compute capability 9.0 can read or write x.
bool fits_sm90(const Tensor& x);

/// Runs the kernel for compute capability 9.0. Requires 16-bit floats, device_has_wgmma(), and fits_sm90() for all
/// matrices.
void multiply_sm90(const TiledMatmulArgs& args);

}  // namespace mica::kernels::tiles
