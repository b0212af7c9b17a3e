// One step of a recurrent layer: one thread per element of a state.
//
//     forward     gates from the input + from the hidden state ──> gates, c, h
//     backward    gates, states, gradients of h and c ──> gradients of the gates and of the states before

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/recurrent/detail/cells.h>
#include <mica/ops/recurrent/detail/recurrent_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

template <class Cell, class T>
__global__ void __launch_bounds__(kThreads) cell_forward_kernel(cells::StepForward<T> a) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= a.rows * a.width) {
    return;
  }
  const std::int64_t row = at / a.width, first = row * a.width;
  if (a.is_padding(row)) {
    cells::forward_padding<Cell>(a, first, at - first);
  } else {
    cells::forward_element<Cell>(a, first, at - first);
  }
}

template <class Cell, class T>
__global__ void __launch_bounds__(kThreads) cell_backward_kernel(cells::StepBackward<T> a) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= a.rows * a.width) {
    return;
  }
  const std::int64_t row = at / a.width, first = row * a.width;
  if (a.is_padding(row)) {
    cells::backward_padding<Cell>(a, first, at - first);
  } else {
    cells::backward_element<Cell>(a, first, at - first);
  }
}

unsigned blocks_for(std::int64_t elements) {
  check(elements <= std::int64_t{INT32_MAX} * kThreads, "recurrent: a state of {} elements is too large", elements);
  return static_cast<unsigned>((elements + kThreads - 1) / kThreads);
}

}  // namespace

void cell_forward(Cuda, const CellForward& args) {
  on_dtype(FloatTypes{}, args.h.dtype(), "recurrent", [&]<class T>() {
    const cells::StepForward<T> a(args);
    cells::with_cell(args.kind, [&]<class Cell>() {
      cell_forward_kernel<Cell, T><<<blocks_for(args.h.numel()), kThreads, 0, cuda::current_stream()>>>(a);
      cuda::check_launch("cell_forward_kernel");
    });
  });
}

void cell_backward(Cuda, const CellBackward& args) {
  on_dtype(FloatTypes{}, args.dx.dtype(), "recurrent", [&]<class T>() {
    const cells::StepBackward<T> a(args);
    cells::with_cell(args.kind, [&]<class Cell>() {
      cell_backward_kernel<Cell, T><<<blocks_for(args.h.numel()), kThreads, 0, cuda::current_stream()>>>(a);
      cuda::check_launch("cell_backward_kernel");
    });
  });
}

}  // namespace mica::kernels
