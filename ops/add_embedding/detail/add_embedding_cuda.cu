// Token and position embedding in one pass:
//
//     indices ──> row of the table ─┐
//                                   ├──> + ──> dropout ──> row of y        one warp per row, 16 bytes per lane
//             row of the addend ────┘
//
// kDrop: with dropout. Rows that are not aligned to 16 bytes use the separate ops.

#include <cmath>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/add_embedding/detail/add_embedding_kernels.h>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/rows/detail/rows_cuda.cuh>

namespace mica::kernels {

using namespace rows;

namespace {

constexpr int kRows = 8;  // per block, one warp each

template <class T>
struct AddEmbeddingArguments {
  const T* weight;
  const std::int64_t* indices;
  const T* addend;
  T* y;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t table_rows;
  std::int64_t addend_rows;
  PhiloxKey key;
  std::uint32_t threshold;
  float scale;
};

template <class T, bool kDrop>
__global__ void __launch_bounds__(kRows* kWarp) add_embedding_kernel(const AddEmbeddingArguments<T> a) {
  constexpr int V = 16 / sizeof(T);
  const std::int64_t row = std::int64_t{blockIdx.x} * kRows + threadIdx.y;
  if (row >= a.rows) {
    return;
  }
  [[maybe_unused]] const PhiloxKey key = kDrop ? absolute_key(a.key) : PhiloxKey{};
  const std::int64_t index = a.indices[row];
  const bool found = index >= 0 && index < a.table_rows;
  const T* const from = a.weight + (found ? index : 0) * a.columns;
  const T* const addend = a.addend + row % a.addend_rows * a.columns;
#pragma unroll 2
  for (std::int64_t column = threadIdx.x * V; column < a.columns; column += kWarp * V) {
    float x[V];
    float more[V];
    unpack(load<V>(from + column), x);
    unpack(load<V>(addend + column), more);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x[j] = found ? x[j] + more[j] : NAN;
    }
    const std::int64_t element = row * a.columns + column;
    if constexpr (kDrop) {
      drop_pack(x, element, key, a.threshold, a.scale);
    }
    store(a.y + element, pack_of<T>(x));
  }
}

}  // namespace

bool add_embedding(Cuda, const AddEmbedding& args) {
  bool done = false;
  on_dtype(FloatTypes{}, args.y.dtype(), "add_embedding", [&]<class T>() {
    if constexpr (sizeof(T) <= sizeof(float)) {
      const std::int64_t columns = args.weight.size(1);
      const AddEmbeddingArguments<T> a{.weight = args.weight.data<T>(),
                                       .indices = args.indices.data<std::int64_t>(),
                                       .addend = args.addend.data<T>(),
                                       .y = args.y.data<T>(),
                                       .rows = args.indices.numel(),
                                       .columns = columns,
                                       .table_rows = args.weight.size(0),
                                       .addend_rows = args.addend.numel() / columns,
                                       .key = args.dropout.key,
                                       .threshold = args.dropout.threshold,
                                       .scale = static_cast<float>(args.dropout.scale())};
      with_pack_size<T>(
          columns,
          [&]<int V>(std::integral_constant<int, V>) {
            if constexpr (V == 16 / sizeof(T)) {
              const auto kernel = args.dropout.drops() ? add_embedding_kernel<T, true> : add_embedding_kernel<T, false>;
              kernel<<<grid_of((a.rows + kRows - 1) / kRows), dim3(kWarp, kRows), 0, cuda::current_stream()>>>(a);
              cuda::check_launch("add_embedding_kernel");
              done = true;
            }
          },
          a.weight, a.addend, a.y);
    }
  });
  return done;
}

}  // namespace mica::kernels
