#include "swiglu_kernels.h"
#include <mica/core/elementwise_cpu.h>

using namespace mica;

namespace custom {

// mica's element-wise loop handles strides, threads and 16-bit floats.
void swiglu_forward(Cpu device, const Tensor& y, const Tensor& gate, const Tensor& up) {
  on_dtype(FloatTypes{}, y.dtype(), "swiglu",
           [&]<class T>() { elementwise<T, T, T>(device, SwigluValue{}, y, gate, up); });
}

// Two results in one pass. elementwise() could also write both; this example shows a hand-written loop instead.
void swiglu_backward(Cpu, const SwigluBackward& args) {
  on_dtype(FloatTypes{}, args.dy.dtype(), "swiglu", [&]<class T>() {
    const T *dy = args.dy.data<T>(), *gate = args.gate.data<T>(), *up = args.up.data<T>();
    T *dgate = args.dgate.data<T>(), *dup = args.dup.data<T>();
    parallel_for(args.dy.numel(), 16384, [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        swiglu_slopes(dy[i], gate[i], up[i], dgate[i], dup[i]);
      }
    });
  });
}

}  // namespace custom
