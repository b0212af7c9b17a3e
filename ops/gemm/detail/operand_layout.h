#pragma once

// How the kernels for GPUs see a matrix in memory.

#include <cstdint>

#include <mica/core/detail/ceil_div.h>
#include <mica/core/tensor.h>

namespace mica::gemm {

/// The memory layout of a matrix as lines of contiguous elements: its rows or, if only they are contiguous, its
/// columns. If neither are, the lines are its rows, with a stride of `step`.
struct OperandLayout {
  bool lines_are_rows;
  std::int64_t lines;
  std::int64_t length;   // elements of a line
  std::int64_t leading;  // elements from one line to the next
  std::int64_t step;     // elements from one element of a line to the next
};

inline OperandLayout layout_of(const Tensor& x) {
  const std::int64_t rows = x.size(0);
  const std::int64_t columns = x.size(1);
  // The stride of an axis of length 1 is irrelevant and may be chosen.
  const std::int64_t row_step = x.strides()[0];
  const std::int64_t column_step = columns > 1 ? x.strides()[1] : 1;
  const auto leading = [](std::int64_t lines, std::int64_t step, std::int64_t length) {
    return lines > 1 ? step : ceil_div(length, 8) * 8;
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

}  // namespace mica::gemm
