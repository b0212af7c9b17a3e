#pragma once

#include <cstdint>

namespace mica::gemm {

/// A matrix in memory, read through its strides, of which one is 1.
template <class T>
struct Matrix {
  const T* data = nullptr;
  std::int64_t row = 0;     // elements from one row to the next
  std::int64_t column = 0;  // … and from one column to the next
};

}  // namespace mica::gemm
