// A row of logits is a warp's or a block's, see ops/softmax/row_cuda.cuh. Forward reads it once; backward reads it once
// and writes its gradient.

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/cross_entropy/cross_entropy_kernels.h>
#include <mica/ops/cross_entropy/cross_entropy_ops.h>
#include <mica/ops/reduce/reduce_cuda.cuh>
#include <mica/ops/softmax/row_cuda.cuh>

namespace mica::kernels {

namespace {

template <class V>
__device__ V not_a_number() {
  return std::numeric_limits<V>::quiet_NaN();
}

template <class T, class Index, bool kBlock>
__global__ void __launch_bounds__(kBlock ? 1024 : kWarp* kWarpTeams)
    cross_entropy_rows(const T* logits, const Index* targets, std::int64_t ignore_index, std::int64_t rows,
                       std::int64_t classes, Accumulate<T>* logsumexp, Accumulate<T>* losses) {
  using V = Accumulate<T>;
  const Team<kBlock> team;
  for (std::int64_t row = team.first; row < rows; row += team.step) {
    const std::int64_t target = targets[row];
    if (target == ignore_index) {  // so for the whole team
      if (team.t == 0) {
        logsumexp[row] = 0;
        losses[row] = 0;
      }
      continue;
    }
    const T* x = logits + row * classes;
    const auto found = joined<kBlock>(found_in_row<OnlineSumExp<V>>(x, classes, team.t, team.threads));
    if (team.t == 0) {
      const bool valid = target >= 0 && target < classes;
      const V log_sum = math::log(found.total());
      logsumexp[row] = found.largest + log_sum;
      losses[row] = valid ? found.largest - static_cast<V>(x[target]) + log_sum : not_a_number<V>();
    }
  }
}

/// divisor: null for 1. per_row: dloss has an element for each row, else one for all.
template <class T, class Index, bool kBlock>
__global__ void __launch_bounds__(kBlock ? 1024 : kWarp* kWarpTeams)
    cross_entropy_backward_rows(const T* logits, const Index* targets, std::int64_t ignore_index, std::int64_t rows,
                                std::int64_t classes, const Accumulate<T>* logsumexp, const T* dloss, bool per_row,
                                const Accumulate<T>* divisor, T* dlogits) {
  using V = Accumulate<T>;
  const Team<kBlock> team;
  for (std::int64_t row = team.first; row < rows; row += team.step) {
    const T* x = logits + row * classes;
    T* dx = dlogits + row * classes;
    const std::int64_t target = targets[row];
    if (target == ignore_index) {
      map_row(x, dx, classes, team.t, team.threads, [](V, std::int64_t) { return V{0}; });
      continue;
    }
    const bool valid = target >= 0 && target < classes;
    const V given = static_cast<V>(dloss[per_row ? row : 0]) / (divisor != nullptr ? *divisor : V{1});
    const V scale = valid ? given : not_a_number<V>();
    const V log_sum = logsumexp[row];
    map_row(x, dx, classes, team.t, team.threads, [&](V value, std::int64_t i) {
      return (math::exp(value - log_sum) - (i == target ? V{1} : V{0})) * scale;
    });
  }
}

/// Calls launch.operator()<T, Index, kBlock>(blocks, threads).
template <class Launch>
void for_types(const Tensor& logits, const Tensor& targets, const Launch& launch) {
  const std::int64_t rows = logits.size(0);
  const std::int64_t classes = logits.size(1);
  on_dtype(FloatTypes{}, logits.dtype(), "cross_entropy", [&]<class T>() {
    on_dtype(IndexTypes{}, targets.dtype(), "cross_entropy", [&]<class Index>() {
      if (classes <= kWarpRow) {
        launch.template operator()<T, Index, false>(row_blocks(rows, false), kWarp * kWarpTeams);
      } else {
        launch.template operator()<T, Index, true>(row_blocks(rows, true), row_threads(classes));
      }
    });
  });
}

}  // namespace

void cross_entropy_forward(Cuda, const CrossEntropyForward& args) {
  const cudaStream_t stream = cuda::current_stream();
  for_types(args.logits, args.targets, [&]<class T, class Index, bool kBlock>(unsigned blocks, int threads) {
    using V = Accumulate<T>;
    cross_entropy_rows<T, Index, kBlock><<<blocks, threads, 0, stream>>>(
        args.logits.data<T>(), args.targets.data<Index>(), args.ignore_index, args.logits.size(0), args.logits.size(1),
        args.logsumexp.data<V>(), args.losses.data<V>());
  });
  cuda::check_launch("cross_entropy_rows");
}

void cross_entropy_reduce(Cuda device, const CrossEntropyReduce& args) {
  on_dtype(FloatTypes{}, args.loss.dtype(), "cross_entropy", [&]<class T>() {
    using V = Accumulate<T>;
    if (!args.count.defined()) {
      reduce<V>(device, SumLossOp<V, T>{}, args.losses, args.loss);
      return;
    }
    on_dtype(IndexTypes{}, args.targets.dtype(), "cross_entropy", [&]<class Index>() {
      reduce<Index>(device, CountValidOp<Index, V>{args.ignore_index}, args.targets, args.count);
    });
    reduce<V>(device, MeanLossOp<V, T>{}, args.losses, args.loss, args.count.data<V>());
  });
}

void cross_entropy_backward(Cuda, const CrossEntropyBackward& args) {
  const cudaStream_t stream = cuda::current_stream();
  for_types(args.logits, args.targets, [&]<class T, class Index, bool kBlock>(unsigned blocks, int threads) {
    using V = Accumulate<T>;
    cross_entropy_backward_rows<T, Index, kBlock><<<blocks, threads, 0, stream>>>(
        args.logits.data<T>(), args.targets.data<Index>(), args.ignore_index, args.logits.size(0), args.logits.size(1),
        args.logsumexp.data<V>(), args.dloss.data<T>(), args.per_row,
        args.count.defined() ? args.count.data<V>() : nullptr, args.dlogits.data<T>());
  });
  cuda::check_launch("cross_entropy_backward_rows");
}

}  // namespace mica::kernels
