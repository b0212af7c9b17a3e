#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/pool/detail/pool_windows.h>

namespace mica::kernels {

// Tensors are images in one layout, channels last or row-major (ops/images/detail/image_grid.h); `On` is Cpu or Cuda.
// Explicitly instantiated in pool_cpu.cpp and pool_cuda.cu.

/// Taps are numbers of taps of a window: uint8 if it has at most 256, else int32.
using TapTypes = Types<std::uint8_t, std::int32_t>;

struct MaxPool {
  const PoolWindows& windows;
  bool channels_last;
  const Tensor& x;
  const Tensor& y;
  const Tensor& taps;  // of y's shape: where the maximum was found; the last NaN if there is one
};
template <class On>
void max_pool_forward(On, const MaxPool& args);

/// Reads or adds to the elements of x that taps refer to.
struct TapTransfer {
  const PoolWindows& windows;
  bool channels_last;
  const Tensor& x;  // images that the windows are of
  const Tensor& y;
  const Tensor& taps;  // of y's shape
};
/// y = the elements of x.
template <class On>
void take_taps(On, const TapTransfer& args);
/// x = at each element, the sum of the y whose taps refer to it.
template <class On>
void add_taps(On, const TapTransfer& args);

/// indices = the positions of the taps in x, counted over the spatial axes; int64, of the shape of taps.
struct TapPositions {
  const PoolWindows& windows;
  bool channels_last;
  const Tensor& taps;
  const Tensor& indices;
};
template <class On>
void tap_positions(On, const TapPositions& args);

struct AveragePool {
  const PoolWindows& windows;
  bool channels_last;
  const Tensor& x;
  const Tensor& y;
  bool include_padding;  // count padded elements
  double divisor;        // 0: the number of elements
};
/// y = Σ of the window / divisor
template <class On>
void average_pool_forward(On, const AveragePool& args);
/// x = Σ of the y whose windows contain it / divisor
template <class On>
void average_pool_backward(On, const AveragePool& args);

}  // namespace mica::kernels
