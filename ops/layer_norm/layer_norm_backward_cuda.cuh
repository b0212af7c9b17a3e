#pragma once

// What the CUDA kernels of layer_norm's backward share. T is the type of x, dy and dx, W that of the parameters, S that
// of sums: float, or double for double.

#include <cstdint>

#include <mica/core/tensor.h>
#include <mica/ops/rows/rows_cuda.cuh>

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
  T* dx;                  // null, as what follows may be: not wanted
  W* dweight;             // (N)
  W* dbias;               // (N)
  S* dweights = nullptr;  // (G, N), partial sums
  S* dbiases = nullptr;   // (G, N)
};

/// Memory for G rows of those partials that are wanted; a has the pointers. Undefined: none are.
template <class T, class W>
Tensor allocate_partials(Backward<T, W>& a, std::int64_t partial_rows, Device device) {
  using S = Accumulate<T>;
  const int wanted = (a.dweight != nullptr) + (a.dbias != nullptr);
  if (wanted == 0) {
    return {};
  }
  const std::int64_t one = partial_rows * a.columns;
  Tensor partials = empty({wanted * one}, dtype_of<S>, device);
  S* const begin = partials.template data<S>();
  a.dweights = a.dweight != nullptr ? begin : nullptr;
  a.dbiases = a.dbias != nullptr ? begin + (wanted - 1) * one : nullptr;
  return partials;
}

/// Stage 2: dweight and dbias, those that are wanted, from G rows of partials.
template <class T, class W>
void add_partials(const Backward<T, W>& a, std::int64_t partial_rows);

/// dweight and dbias, those that are wanted, without dx.
template <class T, class W>
void backward_parameters(Backward<T, W> a, Device device);

/// Stage 1 with rows that stream through shared memory: how many rows of partials it writes, G. 0: it is not for rows
/// of this length or alignment, or not for this chip.
template <class T, class W>
std::int64_t stream_partial_rows(const Backward<T, W>& a);

template <class T, class W>
void backward_stream(const Backward<T, W>& a);

}  // namespace mica::kernels::layer_norm_cuda
