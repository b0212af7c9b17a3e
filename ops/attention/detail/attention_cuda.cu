#include <algorithm>
#include <limits>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/attention/detail/attention_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 128;      // of a block with one row per warp
constexpr int kLongThreads = 512;  // of a block with one row
constexpr std::int64_t kBlocks = 1 << 20;

// The rows of a group of threads, and their visible part.
struct Rows {
  std::int64_t count;    // of all matrices together
  std::int64_t queries;  // T
  std::int64_t keys;     // S
  bool causal;
  std::int64_t offset;

  __device__ std::int64_t seen(std::int64_t row) const {
    return causal ? max(std::int64_t{0}, min(row % queries + 1 + offset, keys)) : keys;
  }
};

struct Add {
  template <class S>
  __device__ S operator()(S a, S b) const {
    return a + b;
  }
};

struct Larger {
  template <class S>
  __device__ S operator()(S a, S b) const {
    return a > b ? a : b;
  }
};

// Every lane gets the result, summed in the same order.
template <class S, class Op>
__device__ S over_warp(S value, Op op) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

template <class S, class Op>
__device__ S over_block(S value, Op op, S* shared) {
  value = over_warp(value, op);
  __syncthreads();  // the last result has been read
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  S result = shared[0];
  for (int warp = 1; warp < kLongThreads / kWarp; ++warp) {
    result = op(result, shared[warp]);
  }
  return result;
}

// The maximum to subtract from a row's scores: rows without a finite score must sum to 0, not to NaN.
template <class S>
__device__ S finite_most(S most) {
  return most == -std::numeric_limits<S>::infinity() ? S{0} : most;
}
template <class S>
__device__ S share_of(S sum) {
  return sum == S{0} ? S{0} : 1 / sum;
}

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// One warp per row, which it keeps in registers: at most 32 · kItems columns.
template <class T, int kItems>
__global__ void __launch_bounds__(kThreads)
    forward_in_registers(const T* __restrict__ scores, T* __restrict__ weights, Rows rows, Accumulate<T> scale) {
  using S = Accumulate<T>;
  constexpr int kRowsAtOnce = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRowsAtOnce;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsAtOnce + threadIdx.x / kWarp; row < rows.count;
       row += step) {
    const T* const from = scores + row * rows.keys;
    T* const to = weights + row * rows.keys;
    const int seen = static_cast<int>(rows.seen(row));
    S values[kItems];
    S most = -std::numeric_limits<S>::infinity();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = i * kWarp + lane;
      values[i] = column < seen ? static_cast<S>(from[column]) * scale : -std::numeric_limits<S>::infinity();
      most = Larger{}(values[i], most);
    }
    most = finite_most(over_warp(most, Larger{}));
    S sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      values[i] = i * kWarp + lane < seen ? exponential(values[i] - most) : S{0};
      sum += values[i];
    }
    const S share = share_of(over_warp(sum, Add{}));
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = i * kWarp + lane;
      if (column < rows.keys) {
        to[column] = static_cast<T>(column < seen ? values[i] * share : S{0});
      }
    }
  }
}

// One block per row, which it reads three times.
template <class T>
__global__ void __launch_bounds__(kLongThreads)
    forward_long(const T* __restrict__ scores, T* __restrict__ weights, Rows rows, Accumulate<T> scale) {
  using S = Accumulate<T>;
  __shared__ S shared[kLongThreads / kWarp];
  for (std::int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const T* const from = scores + row * rows.keys;
    T* const to = weights + row * rows.keys;
    const std::int64_t seen = rows.seen(row);
    S most = -std::numeric_limits<S>::infinity();
    for (std::int64_t column = threadIdx.x; column < seen; column += kLongThreads) {
      most = Larger{}(static_cast<S>(from[column]) * scale, most);
    }
    most = finite_most(over_block(most, Larger{}, shared));
    S sum = 0;
    for (std::int64_t column = threadIdx.x; column < seen; column += kLongThreads) {
      sum += exponential(static_cast<S>(from[column]) * scale - most);
    }
    const S share = share_of(over_block(sum, Add{}, shared));
    for (std::int64_t column = threadIdx.x; column < rows.keys; column += kLongThreads) {
      to[column] =
          static_cast<T>(column < seen ? exponential(static_cast<S>(from[column]) * scale - most) * share : S{0});
    }
  }
}

template <class T, int kItems>
__global__ void __launch_bounds__(kThreads)
    backward_in_registers(const T* __restrict__ weights, const T* __restrict__ dweights, T* __restrict__ dscores,
                          Rows rows, Accumulate<T> scale) {
  using S = Accumulate<T>;
  constexpr int kRowsAtOnce = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRowsAtOnce;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsAtOnce + threadIdx.x / kWarp; row < rows.count;
       row += step) {
    const std::int64_t at = row * rows.keys;
    const int seen = static_cast<int>(rows.seen(row));
    S p[kItems];
    S dp[kItems];
    S sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = i * kWarp + lane;
      p[i] = column < seen ? static_cast<S>(weights[at + column]) : S{0};
      dp[i] = column < seen ? static_cast<S>(dweights[at + column]) : S{0};
      sum += p[i] * dp[i];
    }
    sum = over_warp(sum, Add{});
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = i * kWarp + lane;
      if (column < rows.keys) {
        dscores[at + column] = static_cast<T>(column < seen ? scale * p[i] * (dp[i] - sum) : S{0});
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kLongThreads)
    backward_long(const T* __restrict__ weights, const T* __restrict__ dweights, T* __restrict__ dscores, Rows rows,
                  Accumulate<T> scale) {
  using S = Accumulate<T>;
  __shared__ S shared[kLongThreads / kWarp];
  for (std::int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const std::int64_t at = row * rows.keys;
    const std::int64_t seen = rows.seen(row);
    S sum = 0;
    for (std::int64_t column = threadIdx.x; column < seen; column += kLongThreads) {
      sum += static_cast<S>(weights[at + column]) * static_cast<S>(dweights[at + column]);
    }
    sum = over_block(sum, Add{}, shared);
    for (std::int64_t column = threadIdx.x; column < rows.keys; column += kLongThreads) {
      const S p = column < seen ? static_cast<S>(weights[at + column]) : S{0};
      const S dp = column < seen ? static_cast<S>(dweights[at + column]) : S{0};
      dscores[at + column] = static_cast<T>(scale * p * (dp - sum));
    }
  }
}

// One thread per dropout group; 16 groups form a block of 16 queries and 16 keys.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(T* y, const T* __restrict__ x, std::int64_t queries, std::int64_t keys, std::int64_t groups,
                   WeightDropout dropout, Accumulate<T> scale) {
  constexpr int kBlock = detail::kDropoutBlock;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (group >= groups) {
    return;
  }
  const std::int64_t row_blocks = (queries + kBlock - 1) / kBlock, key_blocks = (keys + kBlock - 1) / kBlock;
  const int u = group / 4 % 4, v = group % 4;
  const std::int64_t key_block = group / 16 % key_blocks;
  const std::int64_t row_of_blocks = group / 16 / key_blocks;
  const std::uint32_t kept = detail::kept_of_dropout_group(
      detail::draw_dropout_group(absolute_key(dropout.key), row_of_blocks, key_block, u, v), dropout.threshold);
  const std::int64_t matrix = row_of_blocks / row_blocks * queries * keys;
  for (int place = 0; place < 16; ++place) {
    const std::int64_t query = row_of_blocks % row_blocks * kBlock + detail::query_of_dropout_group(u, place);
    const std::int64_t key = key_block * kBlock + detail::key_of_dropout_group(v, place);
    if (query < queries && key < keys) {
      const std::int64_t at = matrix + query * keys + key;
      y[at] = static_cast<T>((kept >> place & 1) != 0 ? static_cast<Accumulate<T>>(x[at]) * scale : Accumulate<T>{0});
    }
  }
}

template <class Args>
Rows rows_of(const Tensor& x, const Args& args) {
  return {.count = x.numel() / x.size(-1),
          .queries = x.size(-2),
          .keys = x.size(-1),
          .causal = args.causal,
          .offset = args.causal_offset};
}

// Calls f.operator()<kItems>(blocks, threads) with the number of columns that a lane keeps, or 0 for long rows.
template <class F>
void for_length(const Rows& rows, F&& f) {
  constexpr std::int64_t kRowsAtOnce = kThreads / kWarp;
  const auto blocks = static_cast<unsigned>(std::min(kBlocks, (rows.count + kRowsAtOnce - 1) / kRowsAtOnce));
  if (rows.keys <= 2 * kWarp) {
    f.template operator()<2>(blocks, kThreads);
  } else if (rows.keys <= 8 * kWarp) {
    f.template operator()<8>(blocks, kThreads);
  } else if (rows.keys <= 32 * kWarp) {
    f.template operator()<32>(blocks, kThreads);
  } else {
    f.template operator()<0>(static_cast<unsigned>(std::min(kBlocks, rows.count)), kLongThreads);
  }
}

}  // namespace

void attention_weights_forward(Cuda, const AttentionWeightsForward& args) {
  const Rows rows = rows_of(args.scores, args);
  on_dtype(FloatTypes{}, args.scores.dtype(), "attention_weights", [&]<class T>() {
    for_length(rows, [&]<int kItems>(unsigned blocks, unsigned threads) {
      const T* const scores = args.scores.data<T>();
      T* const weights = args.weights.data<T>();
      const auto scale = static_cast<Accumulate<T>>(args.scale);
      const cudaStream_t stream = cuda::current_stream();
      if constexpr (kItems > 0) {
        forward_in_registers<T, kItems><<<blocks, threads, 0, stream>>>(scores, weights, rows, scale);
      } else {
        forward_long<T><<<blocks, threads, 0, stream>>>(scores, weights, rows, scale);
      }
      cuda::check_launch("attention_weights_forward");
    });
  });
}

void attention_weights_backward(Cuda, const AttentionWeightsBackward& args) {
  const Rows rows = rows_of(args.weights, args);
  on_dtype(FloatTypes{}, args.weights.dtype(), "attention_weights", [&]<class T>() {
    for_length(rows, [&]<int kItems>(unsigned blocks, unsigned threads) {
      const T* const weights = args.weights.data<T>();
      const T* const dweights = args.dweights.data<T>();
      T* const dscores = args.dscores.data<T>();
      const auto scale = static_cast<Accumulate<T>>(args.scale);
      const cudaStream_t stream = cuda::current_stream();
      if constexpr (kItems > 0) {
        backward_in_registers<T, kItems><<<blocks, threads, 0, stream>>>(weights, dweights, dscores, rows, scale);
      } else {
        backward_long<T><<<blocks, threads, 0, stream>>>(weights, dweights, dscores, rows, scale);
      }
      cuda::check_launch("attention_weights_backward");
    });
  });
}

void attention_dropout(Cuda, const AttentionDropout& args) {
  constexpr std::int64_t kBlock = detail::kDropoutBlock;
  const std::int64_t queries = args.x.size(-2), keys = args.x.size(-1);
  const std::int64_t groups =
      args.x.numel() / (queries * keys) * ((queries + kBlock - 1) / kBlock) * ((keys + kBlock - 1) / kBlock) * 16;
  on_dtype(FloatTypes{}, args.x.dtype(), "attention_dropout", [&]<class T>() {
    const auto blocks = static_cast<unsigned>((groups + kThreads - 1) / kThreads);
    dropout_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(
        args.y.data<T>(), args.x.data<T>(), queries, keys, groups, args.dropout,
        static_cast<Accumulate<T>>(args.dropout.scale()));
    cuda::check_launch("attention_dropout");
  });
}

}  // namespace mica::kernels
