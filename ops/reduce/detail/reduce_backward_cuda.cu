#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/reduce/detail/reduce_cuda.cuh>
#include <mica/ops/reduce/detail/reduce_kernels.h>
#include <mica/ops/reduce/detail/reductions.h>

namespace mica::kernels {

void var_backward(Cuda device, const VarBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "var", [&]<class T>() {
    using V = Accumulate<T>;
    elementwise<T, T, T, V, T>(device, VarGradient<V>{static_cast<V>(2 / args.divisor)}, args.dx, args.x, args.first,
                               args.offset, args.dy);
  });
}

void logsumexp_backward(Cuda device, const LogSumExpBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "logsumexp", [&]<class T>() {
    elementwise<T, T, T, T>(device, LogSumExpGradient<Accumulate<T>>{}, args.dx, args.x, args.y, args.dy);
  });
}

void extreme_backward(Cuda device, const ExtremeBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "max", [&]<class T>() {
    using V = Accumulate<T>;
    reduce<T>(device, CountOp<T>{}, args.x, args.count, args.values.data<T>());
    elementwise<T, T, T, V, T>(device, ExtremeGradient<V>{}, args.dx, args.x, args.values, args.count, args.dy);
  });
}

void scatter_along_axis(Cuda device, const ScatterAlongAxis& args) {
  on_dtype(FloatTypes{}, args.dx.dtype(), "max", [&]<class T>() {
    elementwise<T, std::int64_t, std::int64_t, T>(device, ScatterGradient<Accumulate<T>>{}, args.dx, args.positions,
                                                  args.indices, args.dy);
  });
}

}  // namespace mica::kernels
