#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/detail/ceil_div.h>
#include <mica/ops/elementwise/detail/functions.h>
#include <mica/ops/matmul/detail/matmul_epilogue_cuda.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::kernels {

namespace {

using cuda::load;
using cuda::load_streaming;
using cuda::Pack;
using cuda::store;

// A thread block processes 32 adjacent packs of columns and a slab of rows, 8 rows at a time. Each thread has the loads
// of 4 such steps in flight.
constexpr int kLanes = 32;
constexpr int kLines = 8;
constexpr int kThreads = kLanes * kLines;
constexpr int kSteps = 4;
// Slabs are multiples of kSlab rows, and so many that there are about kBlocks blocks: several times as many as run at
// once, so that few multiprocessors are idle at the end. Their number depends on the shape alone, like the sums.
constexpr std::int64_t kSlab = kLines * kSteps;
constexpr std::int64_t kBlocks = 8192;
// Threads of the second kernel that share a column.
constexpr int kSumLines = 32;

// dy times the activation's derivative f′, a function of v, which is f's result or its argument.
struct None {};
struct Relu {
  template <class T, class S>
  __device__ static S gradient(S dy, S v) {
    return functions::Backward<functions::Relu>{}(dy, v);
  }
};
struct LeakyRelu {
  template <class T, class S>
  __device__ static S gradient(S dy, S v) {
    return functions::Backward<functions::LeakyRelu>{{.slope = kLeakySlope}}(dy, v);
  }
};
template <class F>
struct Gated {
  template <class T, class S>
  __device__ static S gradient(S dy, S v) {
    return dy * F::template at<T>(v).slope;
  }
};

template <class T>
struct ActivationBackwardArguments {
  const T* dy;
  const T* v;
  T* dz;
  T* dbias;
  Accumulate<T>* partial;  // (slabs, columns), if there are several slabs
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t slab;
};

template <class F, class T, int V>
__device__ void add_row(const ActivationBackwardArguments<T>& a, std::int64_t at, const Pack<T, V>& dy,
                        const Pack<T, V>& v, Accumulate<T> (&sums)[V]) {
  using S = Accumulate<T>;
  Pack<T, V> dz;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    S gradient = static_cast<S>(dy.at[i]);
    if constexpr (!std::is_same_v<F, None>) {
      gradient = F::template gradient<T>(gradient, static_cast<S>(v.at[i]));
      dz.at[i] = static_cast<T>(gradient);
    }
    sums[i] += gradient;
  }
  if constexpr (!std::is_same_v<F, None>) {
    store(a.dz + at, dz);
  }
}

template <class F, class T, int V>
__device__ Pack<T, V> load_v(const ActivationBackwardArguments<T>& a, std::int64_t at) {
  if constexpr (std::is_same_v<F, None>) {
    return {};
  } else {
    return load_streaming<V>(a.v + at);
  }
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads) activation_backward_kernel(ActivationBackwardArguments<T> a) {
  using S = Accumulate<T>;
  cuda::allow_dependents();
  const int lane = threadIdx.x % kLanes;
  const int line = threadIdx.x / kLanes;
  const std::int64_t first = std::int64_t{blockIdx.x} * kLanes * V;
  const std::int64_t column = first + lane * V;
  std::int64_t row = blockIdx.y * a.slab + line;
  const std::int64_t end = min(a.rows, (blockIdx.y + 1) * a.slab);
  S sums[V] = {};
  if (column < a.columns) {
    for (; row + (kSteps - 1) * kLines < end; row += kSteps * kLines) {
      Pack<T, V> dys[kSteps];
      Pack<T, V> vs[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const std::int64_t at = (row + i * kLines) * a.columns + column;
        dys[i] = load_streaming<V>(a.dy + at);
        vs[i] = load_v<F, T, V>(a, at);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        add_row<F>(a, (row + i * kLines) * a.columns + column, dys[i], vs[i], sums);
      }
    }
    for (; row < end; row += kLines) {
      const std::int64_t at = row * a.columns + column;
      add_row<F>(a, at, load_streaming<V>(a.dy + at), load_v<F, T, V>(a, at), sums);
    }
  }
  __shared__ S lines[kLines][kLanes * V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    lines[line][lane * V + i] = sums[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kLanes * V && first + i < a.columns; i += kThreads) {
    S sum = 0;
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      sum += lines[k][i];
    }
    if (a.partial == nullptr) {
      a.dbias[first + i] = static_cast<T>(sum);
    } else {
      a.partial[blockIdx.y * a.columns + first + i] = sum;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kLanes* kSumLines)
    add_parts_kernel(const Accumulate<T>* parts, T* total, int count, std::int64_t columns) {
  using S = Accumulate<T>;
  const int lane = threadIdx.x % kLanes;
  const int line = threadIdx.x / kLanes;
  const std::int64_t column = std::int64_t{blockIdx.x} * kLanes + lane;
  __shared__ S lines[kSumLines][kLanes];
  cuda::wait_for_previous_kernel();
  S sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int part = line; part < count; part += kSumLines) {
      sum += parts[part * columns + column];
    }
  }
  lines[line][lane] = sum;
  __syncthreads();
  if (line == 0 && column < columns) {
    for (int k = 1; k < kSumLines; ++k) {
      sum += lines[k][lane];
    }
    total[column] = static_cast<T>(sum);
  }
}

template <class F, class T>
void launch(const ActivationBackward& args) {
  using S = Accumulate<T>;
  constexpr bool kHasFunction = !std::is_same_v<F, None>;
  ActivationBackwardArguments<T> a{.dy = args.dy.data<T>(),
                                   .v = kHasFunction ? args.v.data<T>() : nullptr,
                                   .dz = kHasFunction ? args.dz.data<T>() : nullptr,
                                   .dbias = args.dbias.data<T>(),
                                   .partial = nullptr,
                                   .rows = args.dy.size(0),
                                   .columns = args.dy.size(1),
                                   .slab = 0};
  cuda::with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        const std::int64_t across = ceil_div(a.columns, kLanes * V);
        a.slab = ceil_div(a.rows, std::max<std::int64_t>(kBlocks / across, 1) * kSlab) * kSlab;
        const std::int64_t slabs = ceil_div(a.rows, a.slab);
        Tensor partial;
        if (slabs > 1) {
          partial = empty({slabs, a.columns}, dtype_of<S>, args.dy.device());
          a.partial = partial.data<S>();
        }
        const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(slabs));
        cuda::Launch(grid, kThreads).run(activation_backward_kernel<F, T, V>, "activation_backward_kernel", a);
        if (slabs > 1) {
          add_parts(partial, args.dbias);
        }
      },
      a.dy, a.v, a.dz);
}

}  // namespace

void add_parts(const Tensor& parts, const Tensor& total) {
  const std::int64_t columns = parts.size(1);
  on_dtype(FloatTypes{}, total.dtype(), "linear", [&]<class T>() {
    cuda::Launch(static_cast<unsigned>((columns + kLanes - 1) / kLanes), kLanes * kSumLines)
        .dependent()
        .run(add_parts_kernel<T>, "add_parts_kernel", parts.data<Accumulate<T>>(), total.data<T>(),
             static_cast<int>(parts.size(0)), columns);
  });
}

void activation_backward(Cuda, const ActivationBackward& args) {
  on_dtype(FloatTypes{}, args.dy.dtype(), "linear", [&]<class T>() {
    switch (args.activation) {
      case Activation::none: return launch<None, T>(args);
      case Activation::relu: return launch<Relu, T>(args);
      case Activation::leaky_relu: return launch<LeakyRelu, T>(args);
      case Activation::gelu: return launch<Gated<functions::Gelu>, T>(args);
      case Activation::gelu_tanh: return launch<Gated<functions::GeluTanh>, T>(args);
    }
  });
}

}  // namespace mica::kernels
