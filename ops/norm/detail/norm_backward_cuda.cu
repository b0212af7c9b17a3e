#include <mica/core/creation.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

// The backward of every norm on CUDA. Stage 1, of which plan_norm_backward() chooses the kernel, writes dx and G rows
// of partial dweight and dbias; stage 2 adds those up:
//
//     x, dy ──stage 1──▶ dx
//                └──▶ partials (G, N) ──stage 2──▶ dweight, dbias

namespace mica::kernels {

namespace norm_cuda {

namespace {

constexpr int kStage2Warps = 16;

template <class S, class W>
struct Stage2 {
  const S* partials;  // (G, N); null: not wanted
  W* out;             // (N)
};

// The sum of every 16th partial row from row i on, in order.
template <class S>
__device__ S add_rows(const S* partials, std::int64_t rows, std::int64_t columns, int i) {
  S sum = 0;
#pragma unroll 9
  for (std::int64_t row = i; row < rows; row += kStage2Warps) {
    sum += partials[row * columns];
  }
  return sum;
}

// All of up to 2 · 16 rows, in the order of the above for each i in turn; loaded at once.
template <class S>
__device__ S add_few_rows(const S* partials, int rows, std::int64_t columns) {
  S values[2 * kStage2Warps];
#pragma unroll
  for (int row = 0; row < 2 * kStage2Warps; ++row) {
    values[row] = partials[min(row, rows - 1) * columns];
  }
  S total = 0;
#pragma unroll
  for (int i = 0; i < kStage2Warps; ++i) {
    S sum = 0;
    sum += i < rows ? values[i] : S(0);
    sum += i + kStage2Warps < rows ? values[i + kStage2Warps] : S(0);
    total += sum;
  }
  return total;
}

// out[c] = Σ partials[g][c], blockIdx.y = 0 for dweight, 1 for dbias and 2 for dx_bias. A warp has 32 columns. Few rows
// it adds alone; else a block's warps share its columns, deal out the rows and fold in order, to the same bits.
template <bool kFew, class S, class W, class T>
__global__ void __launch_bounds__(kStage2Warps* kWarp)
    norm_backward_sum_kernel(const Stage2<S, W> dweight, const Stage2<S, W> dbias, const Stage2<S, T> dx_bias,
                             std::int64_t partial_rows, std::int64_t columns) {
  __shared__ S fold[kStage2Warps][kWarp];
  cuda::wait_for_previous_kernel();
  const S* const partials = blockIdx.y == 0 ? dweight.partials : blockIdx.y == 1 ? dbias.partials : dx_bias.partials;
  if (partials == nullptr) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const std::int64_t column = (kFew ? std::int64_t{blockIdx.x} * kStage2Warps + warp : blockIdx.x) * kWarp + lane;
  const bool inside = column < columns;
  S total = 0;
  if constexpr (kFew) {
    total = inside ? add_few_rows(partials + column, static_cast<int>(partial_rows), columns) : S(0);
  } else {
    fold[warp][lane] = inside ? add_rows(partials + column, partial_rows, columns, warp) : S(0);
    __syncthreads();
    if (warp > 0) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kStage2Warps; ++i) {
      total += fold[i][lane];
    }
  }
  if (inside) {
    if (blockIdx.y == 2) {
      dx_bias.out[column] = static_cast<T>(total);
    } else {
      (blockIdx.y == 0 ? dweight.out : dbias.out)[column] = static_cast<W>(total);
    }
  }
}

template <class T, class W>
BackwardRows<T, W> rows_of(const NormBackward& args) {
  using S = Accumulate<T>;
  return {.rows = args.rows,
          .columns = args.columns,
          .dy = args.dy.data_or_null<T>(),
          .x = args.x.data_or_null<T>(),
          .weight = args.weight.data_or_null<W>(),
          .mean = args.mean.data_or_null<S>(),
          .mean_rest = mean_rest_of<S>(args.mean),
          .rstd = args.rstd.data_or_null<S>(),
          .dx = args.dx.data_or_null<T>(),
          .dweight = args.dweight.data_or_null<W>(),
          .dbias = args.dbias.data_or_null<W>(),
          .dsum = args.dsum.data_or_null<T>(),
          .dx_dropped = args.dx_dropped.data_or_null<T>(),
          .dx_bias = args.dx_bias.data_or_null<T>(),
          .key = args.dropout.key,
          .threshold = args.dropout.threshold,
          .scale = static_cast<float>(args.dropout.scale())};
}

template <class T, class W>
NormBackwardPlan plan_of(const BackwardRows<T, W>& a, bool centered, GradientSource source) {
  NormBackwardCase c{.rows = a.rows,
                     .columns = a.columns,
                     .size = static_cast<int>(sizeof(T)),
                     .weight_size = static_cast<int>(sizeof(W)),
                     .centered = centered,
                     .packs = false,
                     .clusters = cuda::device_has_clusters(),
                     .source = source};
  with_pack_size<T>(
      a.columns, [&]<int V>(std::integral_constant<int, V>) { c.packs = V > 1; }, a.dy, a.x, a.weight, a.dx, a.dsum,
      a.dx_dropped);
  return plan_norm_backward(c);
}

template <bool kCentered, class T, class W>
void launch_backward(BackwardRows<T, W> a, Device device) {
  if (a.dx == nullptr || a.rows == 0) {
    return backward_parameters<kCentered>(a, device);
  }
  const NormBackwardPlan plan = plan_of(a, kCentered, GradientSource::y);
  if (plan.kernel == NormBackwardKernel::looped) {
    backward_not_streamed<kCentered>(a, plan);
    return backward_parameters<kCentered>(a, device);
  }
  const Tensor partials = allocate_partials(a, plan.partial_rows, device);
  if (plan.kernel != NormBackwardKernel::streamed) {
    backward_not_streamed<kCentered>(a, plan);
  } else if constexpr (sizeof(T) <= sizeof(float)) {
    backward_streamed<NormBackwardPolicy<kCentered, GradientSource::y>>(a, plan);
  }
  add_partials(a, plan.partial_rows);
}

template <bool kCentered, GradientSource kSource, class T, class W>
bool launch_add_backward(BackwardRows<T, W> a, Device device) {
  const NormBackwardPlan plan = plan_of(a, kCentered, kSource);
  const bool sums_dx = sizeof(T) == 2 && plan.pack > 1 && plan.stream.packs == 1;
  if (plan.kernel != NormBackwardKernel::streamed || (a.dx_bias != nullptr && !sums_dx)) {
    return false;
  }
  const Tensor partials = allocate_partials(a, plan.partial_rows, device);
  backward_streamed<NormBackwardPolicy<kCentered, kSource>>(a, plan);
  add_partials(a, plan.partial_rows);
  return true;
}

// The tensor whose dtype is the parameters'.
const Tensor& parameter_of(const NormBackward& args) {
  return args.weight.defined()    ? args.weight
         : args.dweight.defined() ? args.dweight
         : args.dbias.defined()   ? args.dbias
                                  : args.x;
}

}  // namespace

template <class T, class W>
Tensor allocate_partials(BackwardRows<T, W>& a, std::int64_t partial_rows, Device device) {
  using S = Accumulate<T>;
  const std::int64_t one = partial_rows * a.columns;
  const int wanted = (a.dweight != nullptr) + (a.dbias != nullptr) + (a.dx_bias != nullptr);
  if (wanted == 0) {
    return {};
  }
  Tensor partials = empty({wanted * one}, dtype_of<S>, device);
  S* next = partials.template data<S>();
  const auto take = [&](bool is_wanted) {
    S* const taken = is_wanted ? next : nullptr;
    next += is_wanted ? one : 0;
    return taken;
  };
  a.dweights = take(a.dweight != nullptr);
  a.dbiases = take(a.dbias != nullptr);
  a.dx_biases = take(a.dx_bias != nullptr);
  return partials;
}

template <class T, class W>
void add_partials(const BackwardRows<T, W>& a, std::int64_t partial_rows) {
  using S = Accumulate<T>;
  if (a.dweight == nullptr && a.dbias == nullptr && a.dx_bias == nullptr) {
    return;
  }
  const int results = a.dx_bias != nullptr ? 3 : a.dbias != nullptr ? 2 : 1;
  const bool few = partial_rows <= 2 * kStage2Warps && a.columns >= 32768;  // else too few warps are at work
  const std::int64_t block_columns = few ? kStage2Warps * kWarp : kWarp;
  cuda::Launch(dim3(grid_of((a.columns + block_columns - 1) / block_columns), results), kStage2Warps * kWarp)
      .dependent()
      .run(few ? norm_backward_sum_kernel<true, S, W, T> : norm_backward_sum_kernel<false, S, W, T>,
           "norm_backward_sum_kernel", Stage2<S, W>{a.dweights, a.dweight}, Stage2<S, W>{a.dbiases, a.dbias},
           Stage2<S, T>{a.dx_biases, a.dx_bias}, partial_rows, a.columns);
}

#define MICA_INSTANTIATE(T, W)                                                  \
  template Tensor allocate_partials(BackwardRows<T, W>&, std::int64_t, Device); \
  template void add_partials(const BackwardRows<T, W>&, std::int64_t)
MICA_FOR_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace norm_cuda

void norm_backward(Cuda, const NormBackward& args) {
  rows::on_row_types(args.x.dtype(), norm_cuda::parameter_of(args).dtype(), "norm", [&]<class T, class W>() {
    const auto a = norm_cuda::rows_of<T, W>(args);
    args.centered ? norm_cuda::launch_backward<true>(a, args.x.device())
                  : norm_cuda::launch_backward<false>(a, args.x.device());
  });
}

bool add_norm_backward(Cuda, const NormBackward& args) {
  using norm_cuda::GradientSource;
  bool done = false;
  rows::on_row_types(args.x.dtype(), norm_cuda::parameter_of(args).dtype(), "norm", [&]<class T, class W>() {
    if constexpr (sizeof(T) <= sizeof(float)) {
      const auto a = norm_cuda::rows_of<T, W>(args);
      const auto launch = [&]<bool kCentered>() {
        return args.dx_dropped.defined()
                   ? norm_cuda::launch_add_backward<kCentered, GradientSource::y_and_dropped_sum>(a, args.x.device())
                   : norm_cuda::launch_add_backward<kCentered, GradientSource::y_and_sum>(a, args.x.device());
      };
      done = args.centered ? launch.template operator()<true>() : launch.template operator()<false>();
    }
  });
  return done;
}

}  // namespace mica::kernels
