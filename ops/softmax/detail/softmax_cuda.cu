// Last axis: softmax_held_cuda.cu has the kernels for most rows. Here are those for float64, for rows that are not
// aligned, and for long ones: a row is a warp's or a block's, see row_cuda.cuh. It is read from memory once where it
// can be kept, in the registers of a warp or in shared memory, and twice beyond. Other axes: a block for 32 columns.

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/softmax/detail/row_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_kernels.h>

namespace mica::kernels {

namespace {

constexpr std::size_t kShared = 40 * 1024;  // bytes of a row that are kept; leaves room for the team's exchange
constexpr int kColumns = 32;
constexpr int kColumnRows = 8;

/// What softmax and log_softmax make of an element once largest and sum are known.
template <bool kLog, class V>
struct Finish {
  V largest;
  V scale;  // 1 / sum, or log sum

  __device__ explicit Finish(const OnlineSumExp<V>& found)
      : largest(found.largest), scale(kLog ? math::log(found.total()) : V{1} / found.total()) {}
  __device__ V operator()(V x) const { return kLog ? x - largest - scale : math::exp(x - largest) * scale; }
};

/// What goes into the sum of the backward, and what becomes of it.
template <bool kLog, class V>
struct Gradient {
  __device__ static V term(V y, V dy) { return kLog ? dy : dy * y; }
  __device__ static V dx(V y, V dy, V sum) { return kLog ? dy - math::exp(y) * sum : y * (dy - sum); }
};

// A row in the registers of a warp, kItems elements a thread.

template <class T, bool kLog, int kItems>
__global__ void __launch_bounds__(kWarp* kWarpTeams) softmax_warp(const T* x, T* y, std::int64_t rows, std::int64_t n) {
  using V = Accumulate<T>;
  const Team<false> team;
  for (std::int64_t row = team.first; row < rows; row += team.step) {
    V values[kItems];
    auto found = OnlineSumExp<V>::nothing();
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const std::int64_t i = team.t + j * kWarp;
      values[j] = i < n ? static_cast<V>(x[row * n + i]) : -std::numeric_limits<V>::infinity();
      found.largest = values[j] > found.largest ? values[j] : found.largest;
    }
    // With the values at hand, the sum is taken once the thread's largest is known.
    const bool nothing = found.largest == -std::numeric_limits<V>::infinity();
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      found.sum += math::exp(values[j] - (nothing ? V{0} : found.largest));
    }
    const Finish<kLog, V> finish(joined<false>(found));
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const std::int64_t i = team.t + j * kWarp;
      if (i < n) {
        y[row * n + i] = static_cast<T>(finish(values[j]));
      }
    }
  }
}

template <class T, bool kLog, int kItems>
__global__ void __launch_bounds__(kWarp* kWarpTeams)
    softmax_backward_warp(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t n) {
  using V = Accumulate<T>;
  const Team<false> team;
  for (std::int64_t row = team.first; row < rows; row += team.step) {
    V out[kItems];
    V gradient[kItems];
    auto found = PlainSum<V>::nothing();
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const std::int64_t i = team.t + j * kWarp;
      out[j] = i < n ? static_cast<V>(y[row * n + i]) : V{0};
      gradient[j] = i < n ? static_cast<V>(dy[row * n + i]) : V{0};
      found.add(Gradient<kLog, V>::term(out[j], gradient[j]));
    }
    const V sum = joined<false>(found).sum;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const std::int64_t i = team.t + j * kWarp;
      if (i < n) {
        dx[row * n + i] = static_cast<T>(Gradient<kLog, V>::dx(out[j], gradient[j], sum));
      }
    }
  }
}

// A row for a block.

/// keep: the row fits the dynamic shared memory.
template <class T, bool kLog>
__global__ void __launch_bounds__(1024) softmax_block(const T* x, T* y, std::int64_t rows, std::int64_t n, bool keep) {
  using V = Accumulate<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  T* const kept = reinterpret_cast<T*>(memory);
  const Team<true> team;
  for (std::int64_t row = team.first; row < rows; row += team.step) {
    const T* from = x + row * n;
    if (keep) {
      // Each thread later reads what it has written itself, so there is nothing to wait for.
      map_row(from, kept, n, team.t, team.threads, [](V value, std::int64_t) { return value; });
      from = kept;
    }
    const Finish<kLog, V> finish(joined<true>(found_in_row<OnlineSumExp<V>>(from, n, team.t, team.threads)));
    map_row(from, y + row * n, n, team.t, team.threads, [&](V value, std::int64_t) { return finish(value); });
  }
}

template <class T, bool kLog>
__global__ void __launch_bounds__(1024)
    softmax_backward_block(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t n) {
  using V = Accumulate<T>;
  using Rule = Gradient<kLog, V>;
  constexpr int kPack = Pack<T>::kSize;
  const Team<true> team;
  for (std::int64_t row = team.first; row < rows; row += team.step) {
    const T* out = y + row * n;
    const T* gradient = dy + row * n;
    T* to = dx + row * n;
    const bool aligned = is_aligned(out) && is_aligned(gradient) && is_aligned(to);
    auto found = PlainSum<V>::nothing();
    for_row<T>(
        n, team.t, team.threads,
        [&](std::int64_t i) {
          const Pack<T> a = load_pack(out + i, aligned);
          const Pack<T> b = load_pack(gradient + i, aligned);
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            found.add(Rule::term(static_cast<V>(a.values[j]), static_cast<V>(b.values[j])));
          }
        },
        [&](std::int64_t i) { found.add(Rule::term(static_cast<V>(out[i]), static_cast<V>(gradient[i]))); });
    const V sum = joined<true>(found).sum;
    for_row<T>(
        n, team.t, team.threads,
        [&](std::int64_t i) {
          const Pack<T> a = load_pack(out + i, aligned);
          const Pack<T> b = load_pack(gradient + i, aligned);
          Pack<T> c;
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            c.values[j] = static_cast<T>(Rule::dx(static_cast<V>(a.values[j]), static_cast<V>(b.values[j]), sum));
          }
          store_pack(to + i, c, aligned);
        },
        [&](std::int64_t i) {
          to[i] = static_cast<T>(Rule::dx(static_cast<V>(out[i]), static_cast<V>(gradient[i]), sum));
        });
  }
}

// (outer, n, inner): neighboring threads take neighboring columns; kColumnRows of them share a column.

/// What the threads of a column have found, joined in the order of their rows.
template <class Found>
__device__ Found joined_column(Found found) {
  __shared__ Found all[kColumnRows][kColumns];
  __syncthreads();  // until the last column's have been read
  all[threadIdx.y][threadIdx.x] = found;
  __syncthreads();
  found = all[0][threadIdx.x];
  for (int i = 1; i < kColumnRows; ++i) {
    found.join(all[i][threadIdx.x]);
  }
  return found;
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kColumns* kColumnRows)
    softmax_columns(const T* x, T* y, std::int64_t outer, std::int64_t n, std::int64_t inner) {
  using V = Accumulate<T>;
  const std::int64_t tiles = (inner + kColumns - 1) / kColumns;
  for (std::int64_t block = blockIdx.x; block < outer * tiles; block += gridDim.x) {
    const std::int64_t column = block % tiles * kColumns + threadIdx.x;
    const std::int64_t base = block / tiles * n * inner + column;
    const bool valid = column < inner;
    auto found = OnlineSumExp<V>::nothing();
    for (std::int64_t i = threadIdx.y; valid && i < n; i += kColumnRows) {
      found.add(static_cast<V>(x[base + i * inner]));
    }
    const Finish<kLog, V> finish(joined_column(found));
    for (std::int64_t i = threadIdx.y; valid && i < n; i += kColumnRows) {
      y[base + i * inner] = static_cast<T>(finish(static_cast<V>(x[base + i * inner])));
    }
  }
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kColumns* kColumnRows)
    softmax_backward_columns(const T* y, const T* dy, T* dx, std::int64_t outer, std::int64_t n, std::int64_t inner) {
  using V = Accumulate<T>;
  using Rule = Gradient<kLog, V>;
  const std::int64_t tiles = (inner + kColumns - 1) / kColumns;
  for (std::int64_t block = blockIdx.x; block < outer * tiles; block += gridDim.x) {
    const std::int64_t column = block % tiles * kColumns + threadIdx.x;
    const std::int64_t base = block / tiles * n * inner + column;
    const bool valid = column < inner;
    auto found = PlainSum<V>::nothing();
    for (std::int64_t i = threadIdx.y; valid && i < n; i += kColumnRows) {
      const std::int64_t at = base + i * inner;
      found.add(Rule::term(static_cast<V>(y[at]), static_cast<V>(dy[at])));
    }
    const V sum = joined_column(found).sum;
    for (std::int64_t i = threadIdx.y; valid && i < n; i += kColumnRows) {
      const std::int64_t at = base + i * inner;
      dx[at] = static_cast<T>(Rule::dx(static_cast<V>(y[at]), static_cast<V>(dy[at]), sum));
    }
  }
}

unsigned column_blocks(const AxisSplit& split) {
  const std::int64_t blocks = split.outer * ((split.inner + kColumns - 1) / kColumns);
  return static_cast<unsigned>(blocks < (1 << 30) ? blocks : (1 << 30));
}

template <bool kLog>
void forward(const SoftmaxForward& args) {
  const AxisSplit split(args.x.shape(), args.axis);
  const cudaStream_t stream = cuda::current_stream();
  const char* kernel = kLog ? "log_softmax_held" : "softmax_held";
  on_dtype(FloatTypes{}, args.x.dtype(), kLog ? "log_softmax" : "softmax", [&]<class T>() {
    const T* x = args.x.data<T>();
    T* y = args.y.data<T>();
    const std::int64_t rows = split.outer, n = split.n;
    if constexpr (!std::is_same_v<T, double>) {
      if (split.inner == 1 && softmax_held<T, kLog>(x, y, rows, n)) {
        return;
      }
    }
    if (split.inner > 1) {
      kernel = kLog ? "log_softmax_columns" : "softmax_columns";
      const dim3 threads(kColumns, kColumnRows);
      softmax_columns<T, kLog><<<column_blocks(split), threads, 0, stream>>>(x, y, rows, n, split.inner);
    } else if (n <= kWarpRow) {
      kernel = kLog ? "log_softmax_warp" : "softmax_warp";
      const unsigned blocks = row_blocks(rows, false);
      const int threads = kWarp * kWarpTeams;
      if (n <= 2 * kWarp) {
        softmax_warp<T, kLog, 2><<<blocks, threads, 0, stream>>>(x, y, rows, n);
      } else if (n <= 8 * kWarp) {
        softmax_warp<T, kLog, 8><<<blocks, threads, 0, stream>>>(x, y, rows, n);
      } else {
        softmax_warp<T, kLog, 32><<<blocks, threads, 0, stream>>>(x, y, rows, n);
      }
    } else {
      kernel = kLog ? "log_softmax_block" : "softmax_block";
      const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(T);
      const bool keep = bytes <= kShared;
      softmax_block<T, kLog><<<row_blocks(rows, true), row_threads(n), keep ? bytes : 0, stream>>>(x, y, rows, n, keep);
    }
  });
  cuda::check_launch(kernel);
}

template <bool kLog>
void backward(const SoftmaxBackward& args) {
  const AxisSplit split(args.y.shape(), args.axis);
  const cudaStream_t stream = cuda::current_stream();
  const char* kernel = kLog ? "log_softmax_backward_held" : "softmax_backward_held";
  on_dtype(FloatTypes{}, args.y.dtype(), kLog ? "log_softmax" : "softmax", [&]<class T>() {
    const T* y = args.y.data<T>();
    const T* dy = args.dy.data<T>();
    T* dx = args.dx.data<T>();
    const std::int64_t rows = split.outer, n = split.n;
    if constexpr (!std::is_same_v<T, double>) {
      if (split.inner == 1 && softmax_backward_held<T, kLog>(y, dy, dx, rows, n)) {
        return;
      }
    }
    if (split.inner > 1) {
      kernel = kLog ? "log_softmax_backward_columns" : "softmax_backward_columns";
      const dim3 threads(kColumns, kColumnRows);
      softmax_backward_columns<T, kLog><<<column_blocks(split), threads, 0, stream>>>(y, dy, dx, rows, n, split.inner);
    } else if (n <= kWarpRow) {
      kernel = kLog ? "log_softmax_backward_warp" : "softmax_backward_warp";
      const unsigned blocks = row_blocks(rows, false);
      const int threads = kWarp * kWarpTeams;
      if (n <= 2 * kWarp) {
        softmax_backward_warp<T, kLog, 2><<<blocks, threads, 0, stream>>>(y, dy, dx, rows, n);
      } else if (n <= 8 * kWarp) {
        softmax_backward_warp<T, kLog, 8><<<blocks, threads, 0, stream>>>(y, dy, dx, rows, n);
      } else {
        softmax_backward_warp<T, kLog, 32><<<blocks, threads, 0, stream>>>(y, dy, dx, rows, n);
      }
    } else {
      kernel = kLog ? "log_softmax_backward_block" : "softmax_backward_block";
      softmax_backward_block<T, kLog><<<row_blocks(rows, true), row_threads(n), 0, stream>>>(y, dy, dx, rows, n);
    }
  });
  cuda::check_launch(kernel);
}

}  // namespace

void softmax(Cuda, const SoftmaxForward& args) { forward<false>(args); }
void log_softmax(Cuda, const SoftmaxForward& args) { forward<true>(args); }
void softmax_backward(Cuda, const SoftmaxBackward& args) { backward<false>(args); }
void log_softmax_backward(Cuda, const SoftmaxBackward& args) { backward<true>(args); }

}  // namespace mica::kernels
