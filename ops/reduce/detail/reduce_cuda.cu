#include <mica/ops/reduce/detail/reduce_cuda.cuh>
#include <mica/ops/reduce/detail/reduce_kernels.h>
#include <mica/ops/reduce/detail/reductions.h>

namespace mica::kernels {

void sum(Cuda device, const Sum& args) {
  on_dtype(AllTypes{}, args.x.dtype(), "sum", [&]<class T>() {
    using Op = SumOp<T>;
    reduce<T>(device, Op{static_cast<typename Op::Value>(args.divisor)}, args.x, args.y);
  });
}

void var(Cuda device, const Var& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "var", [&]<class T>() {
    using V = Accumulate<T>;
    reduce<T>(device, MeanOffsetOp<T>{static_cast<V>(args.count)}, args.x, args.offset, args.first.data<T>());
    reduce<T>(device, VarOp<T>{static_cast<V>(args.divisor)}, args.x, args.y,
              Centers<T>{args.first.data<T>(), args.offset.data<V>()});
  });
}

void logsumexp(Cuda device, const LogSumExp& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "logsumexp", [&]<class T>() {
    using V = Accumulate<T>;
    reduce<T>(device, ExtremeOp<T, true, V>{}, args.x, args.largest);
    reduce<T>(device, LogSumExpOp<T>{}, args.x, args.y, args.largest.data<V>());
  });
}

}  // namespace mica::kernels
