#include <algorithm>

#include <mica/core/cuda/elementwise.cuh>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/gated/detail/gated_kernels.h>

// A unit is a pack of V neighbors in a row: 16 bytes, or one element if pointers or rows are not aligned to 16 bytes.

namespace mica::kernels {

using namespace rows;

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxUnits = std::int64_t{1} << 30;  // of a launch, so that 32 bits count them

// Units per thread, all loaded before the first is used.
template <class T, int V>
constexpr int kUnits = V > 1            ? 2
                       : sizeof(T) == 8 ? 4
                                        : 8;

// Results larger than this are evicted from the L2 cache before they are read. Then inputs are marked evict_last:
// results are evicted in the order in which they were written, which suits DRAM.
constexpr std::int64_t kLargeResult = std::int64_t{40} << 20;  // bytes

// The work of one launch: some of the rows, or a piece of one row.
struct Part {
  std::int64_t dense;    // offset in y and dy
  std::int64_t strided;  // offset in gate, up and their gradients
  std::int64_t rows;
  std::int64_t columns;
};

template <class T>
struct Arguments {
  const T* dy = nullptr;  // backward
  const T* gate = nullptr;
  const T* up = nullptr;
  T* y = nullptr;      // forward
  T* dgate = nullptr;  // backward; null: not needed
  T* dup = nullptr;    // backward; null: not needed
  bool inputs_last_in_l2 = false;
  std::int64_t gap = 0;  // between rows of gate, up and their gradients
  unsigned units = 0;
  unsigned rest = 0;          // elements after the last unit, of a single row
  cuda::Divisor in_row = {};  // units

  /// The offset of a unit in gate, up and their gradients.
  __device__ std::int64_t strided(unsigned unit, int V) const {
    return std::int64_t{unit} * V + in_row.quotient(unit) * gap;
  }
};

template <int V, class T>
__device__ Pack<T, V> load_unit(const T* from, std::uint64_t policy) {
  if constexpr (sizeof(Pack<T, V>) == 16) {
    return load_streaming<V>(from, policy);
  } else {
    return load<V>(from);
  }
}

template <class F, class T, int V>
__device__ Pack<T, V> forward_unit(const Pack<T, V>& gate, const Pack<T, V>& up) {
  using S = Accumulate<T>;
  S g[V];
  S u[V];
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    u[j] *= F::template at<T>(g[j]).value;
  }
  return pack_of<T>(u);
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads) gated_forward_kernel(const Arguments<T> a) {
  constexpr int U = kUnits<T, V>;
  const std::uint64_t policy = a.inputs_last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
  const unsigned first = blockIdx.x * (kThreads * U) + threadIdx.x;
  Pack<T, V> gates[U];
  Pack<T, V> ups[U];
#pragma unroll
  for (int i = 0; i < U; ++i) {
    const unsigned unit = first + i * kThreads;
    if (unit < a.units) {
      const std::int64_t at = a.strided(unit, V);
      gates[i] = load_unit<V>(a.gate + at, policy);
      ups[i] = load_unit<V>(a.up + at, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < U; ++i) {
    const unsigned unit = first + i * kThreads;
    if (unit < a.units) {
      store(a.y + std::int64_t{unit} * V, forward_unit<F>(gates[i], ups[i]));
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < a.rest) {
    const std::int64_t at = std::int64_t{a.units} * V + threadIdx.x;
    store(a.y + at, forward_unit<F>(load<1>(a.gate + at), load<1>(a.up + at)));
  }
}

template <class F, class T, int V>
__device__ void backward_unit(const Arguments<T>& a, std::int64_t at, const Pack<T, V>& dy, const Pack<T, V>& gate,
                              const Pack<T, V>& up) {
  using S = Accumulate<T>;
  S gradient[V];
  S g[V];
  S u[V];
  unpack(dy, gradient);
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const functions::gated::Activation<S> f = F::template at<T>(g[j]);
    u[j] = gradient[j] * u[j] * f.slope;
    gradient[j] *= f.value;
  }
  if (a.dgate != nullptr) {
    store(a.dgate + at, pack_of<T>(u));
  }
  if (a.dup != nullptr) {
    store(a.dup + at, pack_of<T>(gradient));
  }
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads) gated_backward_kernel(const Arguments<T> a) {
  constexpr int U = kUnits<T, V>;
  const std::uint64_t policy = a.inputs_last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
  const unsigned first = blockIdx.x * (kThreads * U) + threadIdx.x;
  Pack<T, V> dys[U];
  Pack<T, V> gates[U];
  Pack<T, V> ups[U];
#pragma unroll
  for (int i = 0; i < U; ++i) {
    const unsigned unit = first + i * kThreads;
    if (unit < a.units) {
      const std::int64_t at = a.strided(unit, V);
      dys[i] = load_unit<V>(a.dy + std::int64_t{unit} * V, policy);
      gates[i] = load_unit<V>(a.gate + at, policy);
      ups[i] = load_unit<V>(a.up + at, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < U; ++i) {
    const unsigned unit = first + i * kThreads;
    if (unit < a.units) {
      backward_unit<F>(a, a.strided(unit, V), dys[i], gates[i], ups[i]);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < a.rest) {
    const std::int64_t at = std::int64_t{a.units} * V + threadIdx.x;
    backward_unit<F>(a, at, load<1>(a.dy + at), load<1>(a.gate + at), load<1>(a.up + at));
  }
}

// On the host.

/// Calls run(part) for parts of at most kMaxUnits · V elements.
template <class Run>
void for_parts(std::int64_t rows, std::int64_t columns, std::int64_t stride, int V, const Run& run) {
  const std::int64_t most = kMaxUnits * V;
  const std::int64_t some_columns = std::min(columns, most);
  const std::int64_t some_rows = std::max<std::int64_t>(most / columns, 1);
  for (std::int64_t row = 0; row < rows; row += some_rows) {
    for (std::int64_t column = 0; column < columns; column += some_columns) {
      run(Part{.dense = row * columns + column,
               .strided = row * stride + column,
               .rows = std::min(some_rows, rows - row),
               .columns = std::min(some_columns, columns - column)});
    }
  }
}

template <class T>
T* moved(T* pointer, std::int64_t elements) {
  return pointer == nullptr ? nullptr : pointer + elements;
}

// Launches kernel(V) for parts of `whole`, whose pointers are those of the whole matrices.
template <class T, class Args, class Kernel>
void launch(const Args& args, const Arguments<T>& whole, const char* name, const Kernel& kernel) {
  constexpr int kFull = 16 / sizeof(T);
  // Rows without gaps are one.
  const bool one_row = args.rows == 1 || args.stride == args.columns;
  const std::int64_t rows = one_row ? 1 : args.rows;
  const std::int64_t columns = one_row ? args.rows * args.columns : args.columns;
  with_pack_size<T>(
      one_row ? kFull : columns,
      [&]<int V>(std::integral_constant<int, V>) {
        for_parts(rows, columns, args.stride, V, [&](const Part& part) {
          Arguments<T> a = whole;
          a.dy = moved(a.dy, part.dense);
          a.gate = moved(a.gate, part.strided);
          a.up = moved(a.up, part.strided);
          a.y = moved(a.y, part.dense);
          a.dgate = moved(a.dgate, part.strided);
          a.dup = moved(a.dup, part.strided);
          a.gap = one_row ? 0 : args.stride - columns;
          a.units = static_cast<unsigned>(part.rows * (part.columns / V));
          a.rest = static_cast<unsigned>(part.columns % V);
          a.in_row = cuda::Divisor(static_cast<unsigned>(std::max<std::int64_t>(part.columns / V, 1)));
          const unsigned blocks = std::max(1u, (a.units + kThreads * kUnits<T, V> - 1) / (kThreads * kUnits<T, V>));
          kernel(std::integral_constant<int, V>{})<<<blocks, kThreads, 0, cuda::current_stream()>>>(a);
          cuda::check_launch(name);
        });
      },
      whole.dy, whole.gate, whole.up, whole.y, whole.dgate, whole.dup);
}

bool is_large(std::int64_t elements, DType dtype) {
  return elements * static_cast<std::int64_t>(size_of(dtype)) > kLargeResult;
}

}  // namespace

void gated_forward(Cuda, const GatedForward& args) {
  std::visit(
      [&]<class F>(F) {
        on_dtype(FloatTypes{}, args.y.dtype(), F::name, [&]<class T>() {
          const Arguments<T> a{.gate = args.gate.data<T>(),
                               .up = args.up.data<T>(),
                               .y = args.y.data<T>(),
                               .inputs_last_in_l2 = is_large(args.rows * args.columns, args.y.dtype())};
          launch(args, a, "gated_forward_kernel",
                 []<int V>(std::integral_constant<int, V>) { return gated_forward_kernel<F, T, V>; });
        });
      },
      args.function);
}

void gated_backward(Cuda, const GatedBackward& args) {
  std::visit(
      [&]<class F>(F) {
        on_dtype(FloatTypes{}, args.dy.dtype(), F::name, [&]<class T>() {
          const Arguments<T> a{.dy = args.dy.data<T>(),
                               .gate = args.gate.data<T>(),
                               .up = args.up.data<T>(),
                               .dgate = args.dgate.data_or_null<T>(),
                               .dup = args.dup.data_or_null<T>(),
                               .inputs_last_in_l2 = is_large(2 * args.rows * args.columns, args.dy.dtype())};
          launch(args, a, "gated_backward_kernel",
                 []<int V>(std::integral_constant<int, V>) { return gated_backward_kernel<F, T, V>; });
        });
      },
      args.function);
}

}  // namespace mica::kernels
