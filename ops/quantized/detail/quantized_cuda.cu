// Chooses the kernel of a product, and has the kernels without tensor cores.
//
//     up to kFewRows rows   packed weight ──> registers, dequantized ──> · x ──> sums of a block's warps ──> y
//                           (few_rows_kernel; if K is split, add_splits_kernel adds up the parts)
//
//     more rows             packed weight ──> dequantize_kernel ──> weight in x's dtype ──> cuBLAS ──> y
//
// Variants of few_rows_kernel: the number of bits, and how many rows of x a block has.

#include <algorithm>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/quantized/detail/quantized_cuda.cuh>
#include <mica/ops/quantized/detail/tensor_cores_cuda.cuh>

namespace mica::kernels {

using namespace quantized_cuda;

namespace {

constexpr int kFewRows = 16;
constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kStrip = kWarp * kColumns;           // columns of a block, and of each of its warps
constexpr int kChunk = 32;                         // rows of the weight per step of a warp, in one group or two
constexpr int kHalf = kChunk / 2;                  // rows that are in one group in any case
constexpr int kChunks = 2;                         // chunks that a warp processes between two barriers
constexpr int kStage = kWarps * kChunks * kChunk;  // rows that a block processes between two barriers
// The number of blocks that fills today's GPUs. A constant, so that sums do not depend on the GPU.
constexpr std::int64_t kEnoughBlocks = 264;

// On the device.

__device__ void store(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::float32: static_cast<float*>(data)[i] = value; break;
    case DType::float16: static_cast<Float16*>(data)[i] = Float16(value); break;
    default: static_cast<BFloat16*>(data)[i] = BFloat16(value); break;
  }
}

// The operands of few_rows_kernel.
struct FewRows {
  Weights<Values> weight;
  Values x;
  Values row_factors;
  Values column_factors;
  void* y;
  DType dtype;        // y's
  float* partials;    // (splits, M, N); null if K is not split
  std::int64_t rows;  // M
  int stages;         // per block

  /// Stores the finished sum of an element.
  __device__ void finish(std::int64_t m, std::int64_t n, float sum) const {
    if (column_factors.data != nullptr) {
      sum *= column_factors.at<float>(n);
    }
    if (row_factors.data != nullptr) {
      sum *= row_factors.at<float>(m);
    }
    store(y, dtype, m * weight.columns + n, sum);
  }
};

/// Loads columns [first, first + kStage) of kRows rows of x into shared memory; those past the end become zeros.
template <int kRows>
__device__ void load_x(const FewRows& a, std::int64_t first, float (&x)[kRows][kStage]) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kStage; i += kThreads) {
    const int m = i / kStage;
    const std::int64_t k = first + i % kStage;
    const std::int64_t row = std::int64_t{blockIdx.z} * kRows + m;
    x[m][i % kStage] = row < a.rows && k < a.weight.rows ? a.x.at<float>(row * a.weight.rows + k) : 0.0f;
  }
}

/// sums += x · weights, for kHalf of the kChunk rows of the weight that `words` hold, from row kFirst on.
template <int kFirst, int kBits, int kRows>
__device__ void add_chunk(const std::uint32_t (&words)[kBits][kColumns], const Grid<float> (&grids)[kColumns],
                          const float (&x)[kRows][kStage], int first, float (&sums)[kRows][kColumns]) {
  constexpr int kPerWord = quantized::kWordBits / kBits;
  constexpr int kRun = 4;  // rows per step: 16 bytes of shared memory
#pragma unroll
  for (int k = kFirst; k < kFirst + kHalf; k += kRun) {
    float weights[kRun][kColumns];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float q = integer_at<kBits>(words[(k + i) / kPerWord][c], (k + i) % kPerWord * kBits);
        weights[i][c] = fmaf(q - grids[c].zero, grids[c].scale, grids[c].offset);
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const float4 four = *reinterpret_cast<const float4*>(&x[m][first + k]);
      const float values[kRun] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          sums[m][c] = fmaf(values[i], weights[i][c], sums[m][c]);
        }
      }
    }
  }
}

/// Adds up the sums of all warps in the first one, in a fixed order: each step halves the number of warps.
template <int kRows>
__device__ void add_warps(float (&sums)[kRows][kColumns], float (&shared)[kRows][kStage]) {
  static_assert(kStage >= kWarps / 2 * kStrip);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    __syncthreads();  // shared memory has been read
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        *reinterpret_cast<float4*>(&shared[m][(warp - half) * kStrip + lane * kColumns]) =
            make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
      }
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const float4 other = *reinterpret_cast<const float4*>(&shared[m][warp * kStrip + lane * kColumns]);
        sums[m][0] += other.x;
        sums[m][1] += other.y;
        sums[m][2] += other.z;
        sums[m][3] += other.w;
      }
    }
  }
  if (warp == 0) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      *reinterpret_cast<float4*>(&shared[m][lane * kColumns]) =
          make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
  }
}

/// Writes a thread's finished or partial sums of row m.
__device__ void write_row(const FewRows& a, std::int64_t m, std::int64_t column, const float* sums) {
  for (int c = 0; c < kColumns; ++c) {
    if (m < a.rows && column + c < a.weight.columns) {
      if (a.partials != nullptr) {
        a.partials[(blockIdx.y * a.rows + m) * a.weight.columns + column + c] = sums[c];
      } else {
        a.finish(m, column + c, sums[c]);
      }
    }
  }
}

// The integers of kChunk rows in kColumns columns: kBits words per column.
template <int kBits>
struct Chunk {
  std::uint32_t words[kBits][kColumns];

  __device__ void load(const Weights<Values>& weight, std::int64_t row, std::int64_t column) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      weight.load(row / kChunk * kBits + i, column, words[i]);
    }
  }
};

/// The scales and zeros of kColumns columns in the group of `row`.
__device__ void read_grids(const Weights<Values>& weight, std::int64_t row, std::int64_t column,
                           Grid<float> (&grids)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    grids[c] = weight.grid<float>(row, column + c);
  }
}

/// Thread block (strip, split, i) multiplies kStrip columns of the weight, in a part of K, by the i-th kRows rows of x.
/// A warp loads its next chunk while it processes the current one.
template <int kBits, int kRows>
__global__ void __launch_bounds__(kThreads, 1) few_rows_kernel(const FewRows a) {
  __shared__ alignas(16) float x[kRows][kStage];
  const int in_stage = threadIdx.x / kWarp * kChunks * kChunk;  // offset of this warp's chunks in a stage
  const std::int64_t column = std::int64_t{blockIdx.x} * kStrip + threadIdx.x % kWarp * kColumns;
  const std::int64_t begin = std::int64_t{blockIdx.y} * a.stages * kStage;
  const auto row_of = [&](int i) {
    return begin + std::int64_t{i / kChunks} * kStage + in_stage + i % kChunks * kChunk;
  };
  float sums[kRows][kColumns] = {};

  Chunk<kBits> next;
  next.load(a.weight, row_of(0), column);
  const int chunks = a.stages * kChunks;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const std::int64_t row = row_of(i);
    const Chunk<kBits> chunk = next;
    if (i + 1 < chunks) {
      next.load(a.weight, row_of(i + 1), column);
    }
    if (i % kChunks == 0) {
      __syncthreads();  // the previous stage has been read
      load_x(a, row - in_stage, x);
      __syncthreads();
    }
    if (row < a.weight.rows) {
      const int first = in_stage + i % kChunks * kChunk;
      Grid<float> grids[kColumns];
      read_grids(a.weight, row, column, grids);
      add_chunk<0>(chunk.words, grids, x, first, sums);
      if (a.weight.group_shift == 4 && row + kHalf < a.weight.rows) {
        read_grids(a.weight, row + kHalf, column, grids);
      }
      add_chunk<kHalf>(chunk.words, grids, x, first, sums);
    }
  }

  add_warps(sums, x);
  if (threadIdx.x < kWarp) {
#pragma unroll 1
    for (int m = 0; m < kRows; ++m) {
      write_row(a, std::int64_t{blockIdx.z} * kRows + m, column, &x[m][threadIdx.x * kColumns]);
    }
  }
}

/// Adds the partial sums of each element, in order.
__global__ void __launch_bounds__(kSimpleThreads) add_splits_kernel(const FewRows a, int splits) {
  const std::int64_t size = a.rows * a.weight.columns;
  const std::int64_t i = std::int64_t{blockIdx.x} * kSimpleThreads + threadIdx.x;
  if (i < size) {
    float sum = 0;
    for (int split = 0; split < splits; ++split) {
      sum += a.partials[split * size + i];
    }
    a.finish(i / a.weight.columns, i % a.weight.columns, sum);
  }
}

/// y = y · rows, for y (M, N).
template <class T>
__global__ void __launch_bounds__(kSimpleThreads)
    scale_rows_kernel(T* y, const Accumulate<T>* rows, std::int64_t size, std::int64_t columns) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kSimpleThreads + threadIdx.x;
  if (i < size) {
    y[i] = static_cast<T>(static_cast<Accumulate<T>>(y[i]) * rows[i / columns]);
  }
}

// On the host.

constexpr const char* kOp = "quantized_matmul";

// Calls f.operator()<n>() with the number of rows per block.
template <class F>
void on_rows(std::int64_t rows, const F& f) {
  if (rows <= 1) {
    f.template operator()<1>();
  } else if (rows <= 4) {
    f.template operator()<4>();
  } else {
    f.template operator()<8>();
  }
}

void multiply_without_tensor_cores(const QuantizedMatmulForward& args) {
  const std::int64_t m = args.x.size(0);
  const std::int64_t n = args.weight.columns();
  const std::int64_t strips = (n + kStrip - 1) / kStrip;
  const std::int64_t stages = (args.weight.rows + kStage - 1) / kStage;
  // Splits K into enough parts of whole stages to fill the GPU. Their number does not depend on M, so that the bits of
  // a row do not, either.
  const std::int64_t wanted = std::clamp<std::int64_t>(kEnoughBlocks / strips, 1, stages);
  const std::int64_t stages_each = (stages + wanted - 1) / wanted;
  const std::int64_t splits = (stages + stages_each - 1) / stages_each;

  const Tensor partials = splits > 1 ? empty({splits, m, n}, float32, args.y.device()) : Tensor{};
  const FewRows a{.weight = Weights<Values>(args.weight),
                  .x = Values(args.x),
                  .row_factors = Values(args.rows),
                  .column_factors = Values(args.columns),
                  .y = args.y.raw_data(),
                  .dtype = args.y.dtype(),
                  .partials = partials.defined() ? partials.data<float>() : nullptr,
                  .rows = m,
                  .stages = static_cast<int>(stages_each)};
  const cudaStream_t stream = cuda::current_stream();
  quantized::on_bits(args.weight.bits, [&]<int kBits>() {
    on_rows(m, [&]<int kRows>() {
      const dim3 grid(static_cast<unsigned>(strips), static_cast<unsigned>(splits),
                      static_cast<unsigned>((m + kRows - 1) / kRows));
      few_rows_kernel<kBits, kRows><<<grid, kThreads, 0, stream>>>(a);
    });
  });
  cuda::check_launch("few_rows_kernel");
  if (splits > 1) {
    add_splits_kernel<<<blocks_for(m * n), kSimpleThreads, 0, stream>>>(a, static_cast<int>(splits));
    cuda::check_launch("add_splits_kernel");
  }
}

bool aligned(const Tensor& x) {
  return !x.defined() || x.dim() == 0 || reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0;
}

// Scales or zeros in a form that the kernels for tensor cores can read: scalars are float32.
Tensor readable(const Tensor& x, DType dtype) {
  return x.defined() && (x.dim() == 0 || x.dtype() != dtype) ? converted(x, float32) : x;
}

/// Returns false, and computes nothing, if the GPU, the dtype, the sizes or the alignment are not supported.
bool multiply_on_tensor_cores(const QuantizedMatmulForward& args) {
  const QuantizedWeight& weight = args.weight;
  const DType dtype = args.x.dtype();
  const std::int64_t m = args.x.size(0);
  if ((dtype != float16 && dtype != bfloat16) || !cuda::device_has_clusters() || weight.rows % kUnit != 0 ||
      weight.columns() % 8 != 0 || weight.rows / kUnit * weight.columns() > INT32_MAX || m > INT32_MAX ||
      weight.rows >= 1 << 24 || weight.columns() >= 1 << 22 || !aligned(args.x) || !aligned(args.y) ||
      !aligned(weight.packed) || !aligned(weight.scale) || !aligned(weight.zero) || weight.group_size == 16 ||
      weight.scale_factor.defined() || weight.zero_factor.defined()) {
    return false;
  }
  const Tensor scale = readable(weight.scale, dtype);
  const Tensor zero = readable(weight.zero, dtype);
  int group_shift = 31;
  for (const int shift : {5, 6, 7}) {
    group_shift = weight.group_size == 1 << shift ? shift : group_shift;
  }
  const Product product{.words = reinterpret_cast<const std::uint32_t*>(weight.packed.data<std::int32_t>()),
                        .grids = {.scale = FactorMatrix(scale),
                                  .zero = FactorMatrix(zero),
                                  .adds = weight.mode == QuantizationMode::fused_multiply_add},
                        .columns = static_cast<int>(weight.columns()),
                        .rows = static_cast<int>(weight.rows),
                        .group_shift = group_shift,
                        .m = static_cast<int>(m),
                        .y = args.y.raw_data(),
                        .row_factors = Numbers<float>(args.rows).data,
                        .column_factors = Numbers<float>(args.columns).data};
  if (m <= kFewTensorRows) {
    multiply_few_rows(args.x, weight.bits, product);
    return true;
  }
  return multiply_many_rows(args.x, weight.bits, product);
}

/// The weight multiplied by the columns' factors, rounded to `dtype`.
Tensor scaled_weight(const QuantizedWeight& weight, const Tensor& columns, DType dtype) {
  const Tensor result = empty({weight.rows, weight.columns()}, dtype, weight.packed.device());
  dequantize_into(weight, columns, result);
  return result;
}

void scale_rows(const Tensor& y, const Tensor& rows) {
  if (rows.defined()) {
    on_dtype(FloatTypes{}, y.dtype(), kOp, [&]<class T>() {
      scale_rows_kernel<<<blocks_for(y.numel()), kSimpleThreads, 0, cuda::current_stream()>>>(
          y.data<T>(), rows.data<Accumulate<T>>(), y.numel(), y.numel() / rows.numel());
    });
    cuda::check_launch("scale_rows_kernel");
  }
}

// A contiguous matrix at the start of `x`.
Tensor as_matrix(const Tensor& x, std::int64_t rows, std::int64_t columns) {
  return as_strided(x, {rows, columns}, {columns, 1}, x.handle()->offset);
}

}  // namespace

void quantized_matmul_forward(Cuda device, const QuantizedMatmulForward& args) {
  if (multiply_on_tensor_cores(args)) {
    return;
  }
  if (args.x.size(0) <= kFewRows && args.x.dtype() != float64) {
    multiply_without_tensor_cores(args);
    return;
  }
  const Tensor weight = scaled_weight(args.weight, args.columns, args.x.dtype());
  matmul(device,
         {.a = args.x, .b = weight, .bias = {}, .out = as_matrix(args.y, args.x.size(0), args.weight.columns())});
  scale_rows(args.y, args.rows);
}

void quantized_matmul_backward(Cuda device, const QuantizedMatmulBackward& args) {
  const Tensor weight = scaled_weight(args.weight, args.columns, args.dy.dtype());
  const Tensor transposed = as_strided(weight, {weight.size(1), weight.size(0)}, {1, weight.size(1)}, 0);
  matmul(device,
         {.a = args.dy, .b = transposed, .bias = {}, .out = as_matrix(args.dx, args.dy.size(0), args.weight.rows)});
  scale_rows(args.dx, args.rows);
}

}  // namespace mica::kernels
