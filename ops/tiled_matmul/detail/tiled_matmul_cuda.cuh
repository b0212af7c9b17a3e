#pragma once

// Code shared by the kernels of tiled_matmul.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/wgmma.cuh>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_kernels.h>

namespace mica::kernels::tiles {

using cuda::Lines;

/// The memory layout of an operand, as a set of lines of contiguous elements: its rows or, if these are not contiguous,
/// its columns. If neither are, the lines are its rows, with a stride of `step`.
struct Matrix {
  bool lines_are_rows;
  std::int64_t lines;
  std::int64_t length;   // elements of a line
  std::int64_t leading;  // elements from one line to the next
  std::int64_t step;     // elements from one element of a line to the next
};

inline Matrix matrix_of(const Tensor& x) {
  const std::int64_t rows = x.size(0);
  const std::int64_t columns = x.size(1);
  // The stride of an axis of length 1 is irrelevant and may be chosen.
  const std::int64_t row_step = x.strides()[0];
  const std::int64_t column_step = columns > 1 ? x.strides()[1] : 1;
  const auto leading = [](std::int64_t lines, std::int64_t step, std::int64_t length) {
    return lines > 1 ? step : (length + 7) / 8 * 8;
  };
  if (column_step != 1 && (row_step == 1 || rows == 1)) {
    return {.lines_are_rows = false,
            .lines = columns,
            .length = rows,
            .leading = leading(columns, column_step, rows),
            .step = 1};
  }
  return {.lines_are_rows = true,
          .lines = rows,
          .length = columns,
          .leading = leading(rows, row_step, columns),
          .step = column_step};
}

/// Calls f.operator()<kA, kB>() with the directions of the lines of a and b: along K, or along the rows of a and the
/// columns of b.
template <class F>
void on_lines(const Matrix& a, const Matrix& b, const F& f) {
  if (a.lines_are_rows) {
    b.lines_are_rows ? f.template operator()<Lines::depth, Lines::rows>()
                     : f.template operator()<Lines::depth, Lines::depth>();
  } else {
    b.lines_are_rows ? f.template operator()<Lines::rows, Lines::rows>()
                     : f.template operator()<Lines::rows, Lines::depth>();
  }
}

/// size / part, rounded up: the number of parts, the last of which may be smaller.
inline int parts_of(std::int64_t size, std::int64_t part) { return static_cast<int>((size + part - 1) / part); }

/// The order in which the output's tiles are processed: within a group of a few rows of tiles, column after column;
/// then the next group. The tiles that are processed at the same time then form about a square, and so read few
/// different rows of a and columns of b, which stay in the L2 cache: see README.md.
struct TileOrder {
  int rows;     // of tiles
  int columns;  // of tiles
  int group;    // rows in a group

  constexpr int size() const { return rows * columns; }

  struct Place {
    int row;
    int column;
  };
  __device__ Place place(int tile) const {
    const int first = tile / (group * columns) * group;
    const int height = min(group, rows - first);
    const int in_group = tile - first * columns;
    return {first + in_group % height, in_group / height};
  }
};

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
