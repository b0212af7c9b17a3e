// Softmax over the last axis is in softmax_rows_cuda.cuh. Softmax over other axes is here: a thread block has 32
// adjacent columns, with 8 threads per column, which read it twice.
//
//     lane     0  1  2 …  31
//     warp 0   ↓  ↓  ↓     ↓    elements 0, 8, 16, … of 32 columns
//     warp 1   ↓  ↓  ↓     ↓    elements 1, 9, 17, …
//     …
//     warp 7   ↓  ↓  ↓     ↓    elements 7, 15, 23, …
//
// The 8 threads of a column combine their results through shared memory.

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/softmax/detail/softmax_kernels.h>
#include <mica/ops/softmax/detail/softmax_rows_cuda.cuh>

namespace mica::kernels {

namespace {

using softmax_rows::Kind;
using softmax_rows::SoftmaxRule;

constexpr int kColumns = 32;
constexpr int kColumnThreads = 8;

/// The elements of a tensor (outer, n, inner) that a thread processes: every 8th element of a column.
class Column {
 public:
  __device__ Column(std::int64_t block, std::int64_t tiles, std::int64_t n, std::int64_t inner) : inner_(inner) {
    const std::int64_t column = block % tiles * kColumns + threadIdx.x;
    base_ = block / tiles * n * inner + column;
    end_ = column < inner ? n : 0;
  }

  /// Calls f(index) with the index of each element in the tensor.
  template <class F>
  __device__ void for_each(const F& f) const {
    for (std::int64_t i = threadIdx.y; i < end_; i += kColumnThreads) {
      f(base_ + i * inner_);
    }
  }

 private:
  std::int64_t inner_;
  std::int64_t base_;
  std::int64_t end_;
};

/// The results of a column's threads, combined in the order of the threads.
template <class Found>
__device__ Found joined_column(const Found& mine) {
  __shared__ Found all[kColumnThreads][kColumns];
  __syncthreads();  // the previous column's results have been read
  all[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  Found found = all[0][threadIdx.x];
  for (int i = 1; i < kColumnThreads; ++i) {
    found.join(all[i][threadIdx.x]);
  }
  return found;
}

template <class T, class Rule>
__global__ void __launch_bounds__(kColumns* kColumnThreads)
    softmax_columns(const T* x, T* y, std::int64_t outer, std::int64_t n, std::int64_t inner, Rule rule) {
  using S = Accumulate<T>;
  const std::int64_t tiles = (inner + kColumns - 1) / kColumns;
  for (std::int64_t block = blockIdx.x; block < outer * tiles; block += gridDim.x) {
    const Column column(block, tiles, n, inner);
    auto found = SumExp<S, typename Rule::Power>::nothing();
    column.for_each([&](std::int64_t i) { found.add(static_cast<S>(x[i])); });
    found = joined_column(found);
    const S factor = rule.factor(found.sum);
    column.for_each(
        [&](std::int64_t i) { y[i] = static_cast<T>(rule.result(static_cast<S>(x[i]), found.largest, factor)); });
  }
}

template <class T, class Rule>
__global__ void __launch_bounds__(kColumns* kColumnThreads)
    softmax_backward_columns(const T* y, const T* dy, T* dx, std::int64_t outer, std::int64_t n, std::int64_t inner,
                             Rule rule) {
  using S = Accumulate<T>;
  const std::int64_t tiles = (inner + kColumns - 1) / kColumns;
  for (std::int64_t block = blockIdx.x; block < outer * tiles; block += gridDim.x) {
    const Column column(block, tiles, n, inner);
    auto found = PlainSum<S>::nothing();
    column.for_each([&](std::int64_t i) { found.sum += Rule::term(static_cast<S>(y[i]), static_cast<S>(dy[i])); });
    const S sum = joined_column(found).sum;
    column.for_each([&](std::int64_t i) {
      dx[i] = static_cast<T>(rule.gradient(static_cast<S>(y[i]), static_cast<S>(dy[i]), sum));
    });
  }
}

unsigned column_blocks(const AxisSplit& split) {
  const std::int64_t blocks = split.outer * ((split.inner + kColumns - 1) / kColumns);
  return static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 30));
}

template <Kind kKind>
void forward(const SoftmaxForward& args) {
  const AxisSplit split(args.x.shape(), args.axis);
  on_dtype(FloatTypes{}, args.x.dtype(), "softmax", [&]<class T>() {
    const SoftmaxRule<T, kKind> rule;
    if (split.inner == 1) {
      softmax_rows::forward(args.x.data<T>(), args.y.data<T>(), split.outer, split.n, rule);
    } else {
      softmax_columns<<<column_blocks(split), dim3(kColumns, kColumnThreads), 0, cuda::current_stream()>>>(
          args.x.data<T>(), args.y.data<T>(), split.outer, split.n, split.inner, rule);
      cuda::check_launch("softmax_columns");
    }
  });
}

template <Kind kKind>
void backward(const SoftmaxBackward& args) {
  const AxisSplit split(args.y.shape(), args.axis);
  on_dtype(FloatTypes{}, args.y.dtype(), "softmax", [&]<class T>() {
    const SoftmaxRule<T, kKind> rule;
    const T* const y = args.y.data<T>();
    const T* const dy = args.dy.data<T>();
    if (split.inner == 1) {
      softmax_rows::backward(y, dy, args.dx.data<T>(), split.outer, split.n, rule);
    } else {
      softmax_backward_columns<<<column_blocks(split), dim3(kColumns, kColumnThreads), 0, cuda::current_stream()>>>(
          y, dy, args.dx.data<T>(), split.outer, split.n, split.inner, rule);
      cuda::check_launch("softmax_backward_columns");
    }
  });
}

}  // namespace

void softmax(Cuda, const SoftmaxForward& args) { forward<Kind::softmax>(args); }
void log_softmax(Cuda, const SoftmaxForward& args) { forward<Kind::log_softmax>(args); }
void softmax_backward(Cuda, const SoftmaxBackward& args) { backward<Kind::softmax>(args); }
void log_softmax_backward(Cuda, const SoftmaxBackward& args) { backward<Kind::log_softmax>(args); }

}  // namespace mica::kernels
