#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/sort/detail/sort_key.h>

namespace mica::kernels {

/// positions[r, j] = the number of elements of row r of `sorted` that are less than values[r, j] or, if `right`, not
/// greater. In the order of sort(): NaN is larger than all numbers.
struct SearchSorted {
  const Tensor& sorted;     // (rows, n) or, for all rows of the values, (1, n); row-major, ascending
  const Tensor& values;     // (rows, m) of the same dtype, row-major
  const Tensor& positions;  // (rows, m) int64, row-major
  bool right;
};

void search_sorted(Cpu, const SearchSorted& args);
void search_sorted(Cuda, const SearchSorted& args);

/// A binary search in n sorted elements: see SearchSorted.
template <class T>
MICA_HOST_DEVICE std::int64_t position_in(const T* sorted, std::int64_t n, T value, bool right) {
  const std::uint64_t key = sort_key(value, false);
  std::int64_t low = 0;
  std::int64_t high = n;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    const std::uint64_t other = sort_key(sorted[middle], false);
    if (other < key || (right && other == key)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace mica::kernels
