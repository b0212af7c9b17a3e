#include <mica/core/detail/copy_kernels.h>
#include <mica/core/elementwise_cpu.h>
#include <mica/ops/reduce/detail/reduce_cpu.h>
#include <mica/ops/reduce/detail/reduce_kernels.h>
#include <mica/ops/reduce/detail/reductions.h>

namespace mica::kernels {

namespace {

// Calls f.operator()<V>() with the type that elements of `dtype` are read as: float for 16-bit floats, else their own.
// Throws an error that starts with `op` if V is not among Vs.
template <class... Vs, class F>
void on_value(Types<Vs...> values, DType dtype, const char* op, const F& f) {
  const bool short_float = dtype == DType::float16 || dtype == DType::bfloat16;
  on_dtype(values, short_float ? DType::float32 : dtype, op, f);
}

using FloatValues = Types<float, double>;
using NumericValues = Types<float, double, std::int64_t, std::int32_t, std::uint8_t>;
using AllValues = Types<float, double, std::int64_t, std::int32_t, std::uint8_t, bool>;

// x, or a copy with elements of type V.
template <class V>
Tensor converted(Cpu device, const Tensor& x) {
  if (x.dtype() == dtype_of<V>) {
    return x;
  }
  const Tensor result = empty(x.shape(), dtype_of<V>);
  copy(device, result, x);
  return result;
}

}  // namespace

void sum(Cpu device, const Sum& args) {
  if (args.x.dtype() == DType::bfloat16) {
    // Converts elements while adding them, which for bfloat16 is only a shift of bits.
    reduce<BFloat16>(device, SumOp<BFloat16>{static_cast<float>(args.divisor)}, args.x, args.y);
    return;
  }
  on_value(AllValues{}, args.x.dtype(), "sum",
           [&]<class V>() { reduce<V>(device, SumOp<V>{static_cast<V>(args.divisor)}, args.x, args.y); });
}

void var(Cpu device, const Var& args) {
  // T is the type that elements are read as, V that of the arithmetic.
  const auto reduce_twice = [&]<class T, class V>() {
    const Tensor first = converted<V>(device, args.first);
    const V* const firsts = first.data<V>();
    reduce<T>(device, MeanOffsetOp<V>{static_cast<V>(args.count)}, args.x, args.offset, firsts);
    reduce<T>(device, VarOp<V>{static_cast<V>(args.divisor)}, args.x, args.y,
              Centers<V>{firsts, args.offset.data<V>()});
  };
  if (args.x.dtype() == DType::bfloat16) {
    reduce_twice.operator()<BFloat16, float>();
  } else {
    on_value(FloatValues{}, args.x.dtype(), "var", [&]<class V>() { reduce_twice.template operator()<V, V>(); });
  }
}

void var_backward(Cpu device, const VarBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "var", [&]<class T>() {
    using V = Accumulate<T>;
    elementwise<T, T, T, V, T>(device, VarGradient<V>{static_cast<V>(2 / args.divisor)}, args.dx, args.x, args.first,
                               args.offset, args.dy);
  });
}

void logsumexp(Cpu device, const LogSumExp& args) {
  on_value(FloatValues{}, args.x.dtype(), "logsumexp", [&]<class V>() {
    reduce<V>(device, ExtremeOp<V, true>{}, args.x, args.largest);
    reduce<V>(device, LogSumExpOp<V>{}, args.x, args.y, args.largest.data<V>());
  });
}

void logsumexp_backward(Cpu device, const LogSumExpBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "logsumexp", [&]<class T>() {
    elementwise<T, T, T, T>(device, LogSumExpGradient<Accumulate<T>>{}, args.dx, args.x, args.y, args.dy);
  });
}

void extreme(Cpu device, const Extreme& args) {
  on_value(NumericValues{}, args.x.dtype(), "max", [&]<class V>() {
    if (args.largest) {
      reduce<V>(device, ExtremeOp<V, true>{}, args.x, args.values);
    } else {
      reduce<V>(device, ExtremeOp<V, false>{}, args.x, args.values);
    }
    if (args.indices.defined()) {
      const Tensor values = converted<V>(device, args.values);
      reduce<V>(device, FindOp<V>{}, args.x, args.indices, values.data<V>());
    }
  });
}

void extreme_backward(Cpu device, const ExtremeBackward& args) {
  on_value(FloatValues{}, args.x.dtype(), "max", [&]<class V>() {
    const Tensor values = converted<V>(device, args.values);
    reduce<V>(device, CountOp<V>{}, args.x, args.count, values.data<V>());
  });
  on_dtype(FloatTypes{}, args.x.dtype(), "max", [&]<class T>() {
    using V = Accumulate<T>;
    elementwise<T, T, T, V, T>(device, ExtremeGradient<V>{}, args.dx, args.x, args.values, args.count, args.dy);
  });
}

void scatter_along_axis(Cpu device, const ScatterAlongAxis& args) {
  on_dtype(FloatTypes{}, args.dx.dtype(), "max", [&]<class T>() {
    elementwise<T, std::int64_t, std::int64_t, T>(device, ScatterGradient<Accumulate<T>>{}, args.dx, args.positions,
                                                  args.indices, args.dy);
  });
}

}  // namespace mica::kernels
