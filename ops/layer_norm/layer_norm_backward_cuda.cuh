#pragma once

// What the CUDA kernels of layer_norm's backward share. T is the type of x, dy and dx, W that of the parameters, S that
// of sums: float, or double for double.

#include <cstdint>

#include <mica/ops/layer_norm/rows_cuda.cuh>

namespace mica::kernels::layer_norm_cuda {

template <class T, class W>
struct Backward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* dy;
  const T* x;
  const W* weight;
  const S* mean;
  const S* rstd;
  T* dx;        // null, as the next two may be: not wanted
  S* dweights;  // (G, N)
  S* dbiases;   // (G, N)
};

template <class S>
struct Sums {
  S g;   // Σ g, g = dy · weight
  S gx;  // Σ g · x̂
};

/// Stage 1 with rows that stream through shared memory: how many rows of partials it writes, G. 0: it is not for rows
/// of this length or alignment, or not for this chip.
template <class T, class W>
std::int64_t stream_partial_rows(const Backward<T, W>& a);

template <class T, class W>
void backward_stream(const Backward<T, W>& a);

}  // namespace mica::kernels::layer_norm_cuda
