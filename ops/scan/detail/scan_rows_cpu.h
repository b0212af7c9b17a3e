#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// Scans the rows of a matrix of the shape of x, with at least one column: see scan_bodies.h.
template <class Scan>
void scan_rows(Cpu, const Scan& scan, const Tensor& x) {
  const std::int64_t n = x.shape()[1];
  parallel_for(x.shape()[0], 1 + 16384 / n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      auto carry = static_cast<typename Scan::Carry>(scan.load(r, 0));
      scan.store(r, 0, static_cast<typename Scan::Item>(carry));
      for (std::int64_t j = 1; j < n; ++j) {
        carry = Scan::join_carry(carry, static_cast<typename Scan::Carry>(scan.load(r, j)));
        scan.store(r, j, static_cast<typename Scan::Item>(carry));
      }
    }
  });
}

}  // namespace mica::kernels
