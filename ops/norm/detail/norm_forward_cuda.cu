#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward on CUDA: the plan for a norm, and the launcher that carries it out.

namespace mica::kernels {

using namespace norm_cuda;

namespace {

constexpr std::size_t kKeptInL2 = 40 << 20;  // bytes of results that the L2 cache has room for

template <class T, class W>
Forward<T, W> pointers_of(const NormForward& args) {
  using S = Accumulate<T>;
  return {.rows = args.rows,
          .columns = args.columns,
          .x = args.x.data<T>(),
          .weight = args.weight.data_or_null<W>(),
          .bias = args.bias.data_or_null<W>(),
          .eps = static_cast<S>(args.eps),
          .in_row = S(1) / static_cast<S>(args.columns),
          .y = args.y.data<T>(),
          .mean = args.mean.data_or_null<S>(),
          .mean_rest = mean_rest_of<S>(args.mean),
          .rstd = args.rstd.data_or_null<S>(),
          // What the next kernel reads of smaller results is better found there than the inputs.
          .inputs_last_in_l2 = args.y.bytes() * (args.sum.defined() ? 2 : 1) > kKeptInL2};
}

template <class T>
Addends<T> addends_of(const NormForward& args) {
  return {.residual = args.residual.data<T>(),
          .x_bias = args.x_bias.data_or_null<T>(),
          .sum = args.sum.data<T>(),
          .key = args.dropout.key,
          .threshold = args.dropout.threshold,
          .scale = static_cast<float>(args.dropout.scale())};
}

/// The parameter, or a copy of it, of which pairs can be read at once.
template <class W>
Tensor at_pairs(const Tensor& parameter) {
  if (reinterpret_cast<std::uintptr_t>(parameter.data_or_null<W>()) % sizeof(Pack<W, 2>) == 0) {
    return parameter;
  }
  const Tensor copy = empty(parameter.shape(), parameter.dtype(), parameter.device());
  copy_into(copy, parameter);
  return copy;
}

template <class T, class W>
NormForwardPlan plan_of(const NormForward& args, const Forward<T, W>& a) {
  bool packed = false;
  with_pack_size<T>(
      a.columns, [&]<int V>(std::integral_constant<int, V>) { packed = V > 1; }, a.x, a.weight, a.bias, a.y,
      args.residual.data_or_null<T>(), args.x_bias.data_or_null<T>(), args.sum.data_or_null<T>());
  return norm_forward_plan({.rows = a.rows,
                            .columns = a.columns,
                            .x = dtype_of<T>,
                            .weight = dtype_of<W>,
                            .parameters = a.weight != nullptr && (a.bias != nullptr || !args.centered),
                            .centered = args.centered,
                            .adds = args.residual.defined(),
                            .packed = packed,
                            .clusters = cuda::device_has_clusters(),
                            .multiprocessors = cuda::multiprocessor_count()});
}

template <bool kCentered, class T, class W>
void forward_of_x(const Forward<T, W>& a, const NormForwardPlan& plan) {
  using N = Norm<kCentered>;
  switch (plan.kernel) {
    case NormForwardPlan::Kernel::held: return forward_held<N>(a, NoAddends{}, plan);
    case NormForwardPlan::Kernel::tiles:
      if constexpr (sizeof(T) <= sizeof(float)) {
        return forward_tiles<N>(a, plan);
      }
      [[fallthrough]];
    case NormForwardPlan::Kernel::staged:
      if constexpr (sizeof(T) == 2) {
        return forward_staged<N>(a, plan);
      }
      [[fallthrough]];
    case NormForwardPlan::Kernel::stream:
      if constexpr (sizeof(T) <= sizeof(float)) {
        return forward_stream<N>(a, plan);
      }
      [[fallthrough]];
    case NormForwardPlan::Kernel::looped: return forward_looped<N>(a, plan);
  }
}

template <bool kCentered, class T, class W>
void forward_of_sum(const Forward<T, W>& a, const Addends<T>& addends, const NormForwardPlan& plan) {
  addends.threshold > 0 ? forward_held<Norm<kCentered, Source::dropped_sum>>(a, addends, plan)
                        : forward_held<Norm<kCentered, Source::sum>>(a, addends, plan);
}

/// f(pointers, plan)
template <class F>
void with_plan(const NormForward& args, const F& f) {
  const Tensor& parameter = args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x;
  on_row_types(args.x.dtype(), parameter.dtype(), "norm", [&]<class T, class W>() {
    const Forward<T, W> a = pointers_of<T, W>(args);
    f(a, plan_of(args, a));
  });
}

}  // namespace

void norm_forward(Cuda, const NormForward& args) {
  with_plan(args, [&]<class T, class W>(Forward<T, W> a, const NormForwardPlan& plan) {
    const bool in_pairs = plan.kernel == NormForwardPlan::Kernel::tiles;
    const Tensor weight = in_pairs ? at_pairs<W>(args.weight) : args.weight;
    const Tensor bias = in_pairs ? at_pairs<W>(args.bias) : args.bias;
    a.weight = weight.data_or_null<W>();
    a.bias = bias.data_or_null<W>();
    args.centered ? forward_of_x<true>(a, plan) : forward_of_x<false>(a, plan);
  });
}

bool add_norm_forward(Cuda, const NormForward& args) {
  bool done = false;
  with_plan(args, [&]<class T, class W>(const Forward<T, W>& a, const NormForwardPlan& plan) {
    if constexpr (sizeof(T) <= sizeof(float)) {
      done = plan.kernel == NormForwardPlan::Kernel::held;
      if (done) {
        const Addends<T> addends = addends_of<T>(args);
        args.centered ? forward_of_sum<true>(a, addends, plan) : forward_of_sum<false>(a, addends, plan);
      }
    }
  });
  return done;
}

}  // namespace mica::kernels
