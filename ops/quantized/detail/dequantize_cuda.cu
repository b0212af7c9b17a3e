// Writes a quantized weight as floats, for products that cuBLAS computes:
//
//     a word: 32 / kBits integers of a column ─┐
//                                              ├──> (q − zero) · scale + offset ──> · factor ──> rows of out
//     scale and zero of the group ─────────────┘
//
// There are variants for each number of bits and each dtype.

#include <mica/core/copy.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/ops/quantized/detail/quantized_cuda.cuh>

namespace mica::kernels {

namespace quantized_cuda {

namespace {

/// Scales or zeros of two levels as one: out (groups, columns).
template <class S>
__global__ void __launch_bounds__(kSimpleThreads)
    one_level_kernel(const Values x, const Values factor, S* out, std::int64_t size, std::int64_t columns,
                     std::int64_t groups_per_factor) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kSimpleThreads + threadIdx.x;
  if (i < size) {
    out[i] = x.at<S>(i) * factor.at<S>(i / columns / groups_per_factor * columns + i % columns);
  }
}

/// Scales or zeros in the type that dequantize_kernel reads.
template <class S>
Tensor one_level(const Tensor& x, const Tensor& factor, std::int64_t group_size) {
  if (!factor.defined()) {
    return converted(x, dtype_of<S>);
  }
  const Tensor result = empty(x.shape(), dtype_of<S>, x.device());
  one_level_kernel<S><<<blocks_for(x.numel()), kSimpleThreads, 0, cuda::current_stream()>>>(
      Values(x), Values(factor), result.template data<S>(), x.numel(), x.size(1), quantized::kFactorRows / group_size);
  cuda::check_launch("one_level_kernel");
  return result;
}

/// out = weight · columns. Each thread dequantizes one word of each of four adjacent columns.
template <class T, int kBits, class S = Accumulate<T>>
__global__ void __launch_bounds__(kSimpleThreads)
    dequantize_kernel(const Weights<Numbers<S>> weight, const S* column_factors, T* out) {
  constexpr int kPerWord = quantized::kWordBits / kBits;
  const std::int64_t in_row = (weight.columns + kColumns - 1) / kColumns;
  const std::int64_t i = std::int64_t{blockIdx.x} * kSimpleThreads + threadIdx.x;
  const std::int64_t word_row = i / in_row;
  const std::int64_t column = i % in_row * kColumns;
  if (word_row >= weight.word_rows) {
    return;
  }
  const std::int64_t first = word_row * kPerWord;
  std::uint32_t words[kColumns];
  weight.load(word_row, column, words);
  Grid<S> grids[kColumns];
  S factors[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    grids[c] = weight.template grid<S>(first, column + c);
    factors[c] = column_factors != nullptr && column + c < weight.columns ? column_factors[column + c] : S{1};
  }
  const int valid = static_cast<int>(weight.rows - first < kPerWord ? weight.rows - first : kPerWord);
#pragma unroll 1
  for (int j = 0; j < valid; ++j) {
    cuda::Pack<T, kColumns> four;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const S q = integer_at<kBits>(words[c], j * kBits);
      four.at[c] = static_cast<T>(((q - grids[c].zero) * grids[c].scale + grids[c].offset) * factors[c]);
    }
    T* const to = out + (first + j) * weight.columns + column;
    if (weight.columns % kColumns == 0) {
      cuda::store(to, four);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (column + c < weight.columns) {
          to[c] = four.at[c];
        }
      }
    }
  }
}

}  // namespace

Tensor converted(const Tensor& x, DType dtype) {
  if (!x.defined() || x.dtype() == dtype) {
    return x;
  }
  const Tensor result = empty(x.shape(), dtype, x.device());
  copy_into(result, x);
  return result;
}

void dequantize_into(const QuantizedWeight& weight, const Tensor& columns, const Tensor& out) {
  const std::int64_t threads = weight.packed.size(0) * ((weight.columns() + kColumns - 1) / kColumns);
  on_dtype(FloatTypes{}, out.dtype(), "dequantize", [&]<class T>() {
    using S = Accumulate<T>;
    QuantizedWeight ready = weight;
    ready.scale = one_level<S>(weight.scale, weight.scale_factor, weight.group_size);
    ready.zero = one_level<S>(weight.zero, weight.zero_factor, weight.group_size);
    ready.scale_factor = ready.zero_factor = {};
    quantized::on_bits(weight.bits, [&]<int kBits>() {
      dequantize_kernel<T, kBits><<<blocks_for(threads), kSimpleThreads, 0, cuda::current_stream()>>>(
          Weights<Numbers<S>>(ready), Numbers<S>(columns).data, out.data<T>());
    });
  });
  cuda::check_launch("dequantize_kernel");
}

}  // namespace quantized_cuda

void dequantize(Cuda, const Dequantize& args) { quantized_cuda::dequantize_into(args.weight, {}, args.out); }

}  // namespace mica::kernels
