#include <mica/core/elementwise_cpu.h>
#include <mica/ops/reduce/reduce_cpu.h>
#include <mica/ops/reduce/reduce_kernels.h>
#include <mica/ops/reduce/reduce_ops.h>

namespace mica::kernels {

void sum(Cpu device, const Sum& args) {
  on_dtype(AllTypes{}, args.x.dtype(), "sum", [&]<class T>() {
    using Op = SumOp<T>;
    reduce<T>(device, Op{static_cast<typename Op::Value>(args.divisor)}, args.x, args.y);
  });
}

void var(Cpu device, const Var& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "var", [&]<class T>() {
    using V = Accumulate<T>;
    reduce<T>(device, MeanOffsetOp<T>{static_cast<V>(args.count)}, args.x, args.offset, args.first.data<T>());
    reduce<T>(device, VarOp<T>{static_cast<V>(args.divisor)}, args.x, args.y,
              Centers<T>{args.first.data<T>(), args.offset.data<V>()});
  });
}

void var_backward(Cpu device, const VarBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "var", [&]<class T>() {
    using V = Accumulate<T>;
    elementwise<T, T, T, V, T>(device, VarGradient<V>{static_cast<V>(2 / args.divisor)}, args.dx, args.x, args.first,
                               args.offset, args.dy);
  });
}

void logsumexp(Cpu device, const LogSumExp& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "logsumexp", [&]<class T>() {
    using V = Accumulate<T>;
    reduce<T>(device, ExtremeOp<T, true, V>{}, args.x, args.largest);
    reduce<T>(device, LogSumExpOp<T>{}, args.x, args.y, args.largest.data<V>());
  });
}

void logsumexp_backward(Cpu device, const LogSumExpBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "logsumexp", [&]<class T>() {
    elementwise<T, T, T, T>(device, LogSumExpGradient<Accumulate<T>>{}, args.dx, args.x, args.y, args.dy);
  });
}

void extreme(Cpu device, const Extreme& args) {
  on_dtype(NumericTypes{}, args.x.dtype(), "max", [&]<class T>() {
    if (args.largest) {
      reduce<T>(device, ExtremeOp<T, true>{}, args.x, args.values);
    } else {
      reduce<T>(device, ExtremeOp<T, false>{}, args.x, args.values);
    }
    if (args.indices.defined()) {
      reduce<T>(device, FindOp<T>{}, args.x, args.indices, args.values.data<T>());
    }
  });
}

void extreme_backward(Cpu device, const ExtremeBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "max", [&]<class T>() {
    using V = Accumulate<T>;
    reduce<T>(device, CountOp<T>{}, args.x, args.count, args.values.data<T>());
    elementwise<T, T, T, V, T>(device, ExtremeGradient<V>{}, args.dx, args.x, args.values, args.count, args.dy);
  });
}

void place_along_axis(Cpu device, const PlaceAlongAxis& args) {
  on_dtype(FloatTypes{}, args.dx.dtype(), "max", [&]<class T>() {
    elementwise<T, std::int64_t, std::int64_t, T>(device, PlaceGradient<Accumulate<T>>{}, args.dx, args.positions,
                                                  args.indices, args.dy);
  });
}

}  // namespace mica::kernels
