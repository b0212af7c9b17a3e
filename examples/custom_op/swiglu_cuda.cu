#include "swiglu_kernels.h"
#include <mica/core/cuda/elementwise.cuh>

using namespace mica;

namespace custom {

// mica's element-wise kernel handles strides, alignment and 16-bit floats.
void swiglu_forward(Cuda device, const Tensor& y, const Tensor& gate, const Tensor& up) {
  on_dtype(FloatTypes{}, y.dtype(), "swiglu",
           [&]<class T>() { elementwise<T, T, T>(device, SwigluValue{}, y, gate, up); });
}

// Two results in one pass. elementwise() could also write both; this example shows a hand-written kernel instead.
template <class T>
__global__ void backward_kernel(std::int64_t n, const T* dy, const T* gate, const T* up, T* dgate, T* dup) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) {
    swiglu_slopes(dy[i], gate[i], up[i], dgate[i], dup[i]);
  }
}

void swiglu_backward(Cuda, const SwigluBackward& args) {
  constexpr int kThreads = 256;
  const std::int64_t n = args.dy.numel();
  const auto blocks = static_cast<unsigned>(n / kThreads + 1);  // an empty grid cannot be launched
  on_dtype(FloatTypes{}, args.dy.dtype(), "swiglu", [&]<class T>() {
    backward_kernel<<<blocks, kThreads, 0, cuda::current_stream()>>>(
        n, args.dy.data<T>(), args.gate.data<T>(), args.up.data<T>(), args.dgate.data<T>(), args.dup.data<T>());
    cuda::check_launch("swiglu_backward");
  });
}

}  // namespace custom
