#pragma once

// What the products of few rows by wgmma share (decode_linear_batch_sm90.cu, decode_linear_wide_sm90.cu). The weight is
// the first operand, 64 outputs at a time (SwiGLU: 32 of gate and the same 32 of up); the rows of x are the second.
// Both are divided along K into slices of 64 terms. A row of x in a slice is a line of 128 bytes, which the copy engine
// swizzles.

#include <mica/core/cuda/detail/ring.cuh>
#include <mica/core/cuda/detail/tensor_copy.cuh>
#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/cuda/pack.cuh>
#include <mica/infer/kernels/detail/decode_linear_weights.cuh>
#include <mica/infer/kernels/detail/kernels.h>
#include <mica/infer/kernels/detail/silu.cuh>

namespace mica::kernels::slices {

inline constexpr int kPacks = 8;  // of 16 bytes in a line
inline constexpr int kPackTerms = 8;
inline constexpr int kStride = kOutputs + 4;  // from one row of sums in shared memory to the next; no bank conflicts

struct WeightColumns {
  int first_column;
  const void* bias;  // or null
};

template <class Weights>
struct Operands {
  CUtensorMap x;
  CUtensorMap weights[kMostDecodeWeights];
  typename Weights::Scales scales;
  WeightColumns parts[kMostDecodeWeights];
  int part_count;
  const void* norm;      // or null
  const void* residual;  // or null
  void* y;
  int rows;
  int columns;  // of y
  int depth;
  float eps;
};

using Ring = cuda::VariableRing;

/// Reports that this warp has read a stage. The barrier counts the warps that read it.
__device__ inline void release(std::uint64_t* empty) {
  if (threadIdx.x % kWarp == 0) {
    cuda::arrive(empty);
  }
}

/// The columns of a tile.
template <bool kSwiglu>
struct TileColumns {
  int column;  // of y
  int part = 0;

  template <class Weights>
  __device__ TileColumns(const Operands<Weights>& a, int tile) : column(tile * kColumns<kSwiglu>) {
    while (!kSwiglu && part + 1 < a.part_count && column >= a.parts[part + 1].first_column) {
      ++part;
    }
  }
};

/// Starts to copy a stage of the weights; its first slice is `slice`. The barrier counts Weights::kCopiedBytes bytes.
template <bool kSwiglu, class Weights>
__device__ void load_weights(unsigned char* to, unsigned char* scales, const Operands<Weights>& a,
                             const TileColumns<kSwiglu>& tile, int slice, std::uint64_t* full) {
  constexpr int kHalf = Weights::kStageBytes / 2;
  const int term = slice * kTerms;
  const int column = tile.column - a.parts[tile.part].first_column;
  if constexpr (Weights::kIsPacked) {
    const int line = slice * Weights::kSliceLines;
    cuda::load_tile(to, &a.weights[tile.part], column, line, full);
    if constexpr (kSwiglu) {
      cuda::load_tile(to + kHalf, &a.weights[1], column, line, full);
    } else {
      cuda::load_tile(to + kHalf, &a.weights[tile.part], column + Weights::kHalfOutputs, line, full);
    }
    Weights::template load_scales<kSwiglu>(scales, a.scales, tile.part, column, slice, full);
  } else if constexpr (kSwiglu) {
    cuda::load_tile(to, &a.weights[0], term, column, full);
    cuda::load_tile(to + kHalf, &a.weights[1], term, column, full);
  } else {
    cuda::load_tile(to, &a.weights[tile.part], term, column, full);
  }
}

/// Multiplies a pack of x by the norm's weight, in place, and adds the squares of x to `squares`. Returns the product.
template <class T>
__device__ cuda::Pack<T, kPackTerms> scale_pack(T* at, const T* norm, float& squares) {
  float values[kPackTerms];
  float factors[kPackTerms];
  cuda::unpack(cuda::load<kPackTerms>(at), values);
  cuda::unpack(cuda::load<kPackTerms>(norm), factors);
#pragma unroll
  for (int j = 0; j < kPackTerms; ++j) {
    squares += values[j] * values[j];
    values[j] *= factors[j];
  }
  const cuda::Pack<T, kPackTerms> result = cuda::pack_of<T>(values);
  cuda::store(at, result);
  return result;
}

/// Starts to multiply a slice, as one group of products. Called by a warpgroup.
template <class T, int kRows>
__device__ void multiply_slice(float (&sums)[kRows / 2], const unsigned char* w, const unsigned char* x,
                               bool keep_sums) {
  std::uint64_t a = cuda::depth_lines(w);
  std::uint64_t b = cuda::depth_lines(x);
  cuda::begin_products();
#pragma unroll
  for (int k = 0; k < kTerms; k += 16) {
    cuda::multiply_add<T, kRows, Lines::depth, Lines::depth>(sums, a, b, keep_sums || k > 0);
    a += cuda::kNextDepth<Lines::depth>;
    b += cuda::kNextDepth<Lines::depth>;
  }
  cuda::commit_products();
}

/// Returns threadIdx.x. For packed weights, the compiler cannot tell that it was read before, so it does not keep
/// values derived from it in registers, which the products need.
template <class Weights>
__device__ int thread_now() {
  int thread = static_cast<int>(threadIdx.x);
  if constexpr (Weights::kIsPacked) {
    asm volatile("" : "+r"(thread));
  }
  return thread;
}

/// Writes a warpgroup's sums to shared memory, by row.
template <class Weights, int kRows>
__device__ void store_sums(float (&to)[kRows][kStride], const float (&sums)[kRows / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarp;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[8 * j + lane % 4 * 2 + i % 2][Weights::output(thread / kWarp, lane / 4, i / 2)] = sums[4 * j + i];
    }
  }
}

/// Writes four floats to p in block `rank`, whose *barrier counts their bytes when they have arrived.
__device__ inline void send_four(float* p, const float4& four, int rank, std::uint64_t* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cuda::address_in_block(p, rank)),
               "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(cuda::address_in_block(barrier, rank))
               : "memory");
}

// On the host.

inline CUtensorMap map_of(const Tensor& matrix, int box_lines) {
  return cuda::swizzled_tensor_map({.dtype = matrix.dtype(),
                                    .data = matrix.raw_data(),
                                    .lines = matrix.size(0),
                                    .length = matrix.size(1),
                                    .leading = matrix.size(1),
                                    .box_lines = static_cast<std::uint32_t>(box_lines),
                                    .box_length = kTerms});
}

/// Sets the maps of weight number i.
template <class Weights, bool kSwiglu>
void map_weight(Operands<Weights>& a, int i, const DecodeWeight& w) {
  if constexpr (Weights::kIsPacked) {
    const QuantizedWeight& q = w.quantized;
    const auto map_of_factors = [](const Tensor& factors) {
      return cuda::plain_tensor_map({.dtype = factors.dtype(),
                                     .data = factors.raw_data(),
                                     .lines = factors.size(0),
                                     .length = factors.size(1),
                                     .leading = factors.size(1),
                                     .box_lines = Weights::kUnits,
                                     .box_length = kColumns<kSwiglu>});
    };
    a.weights[i] = cuda::swizzled_tensor_map({.dtype = int32,
                                              .data = q.packed.raw_data(),
                                              .lines = q.packed.size(0),
                                              .length = q.columns(),
                                              .leading = q.columns(),
                                              .box_lines = Weights::kLines,
                                              .box_length = Weights::kHalfOutputs});
    a.scales.scales[i] = map_of_factors(q.scale);
    a.scales.zeros[i] = map_of_factors(q.zero);
    a.scales.group_shift = group_shift(q);
  } else {
    a.weights[i] = map_of(w.matrix, kColumns<kSwiglu>);
  }
}

/// The operands of a kernel that copies x in tiles of kRows rows.
template <class Weights, int kRows, bool kSwiglu>
Operands<Weights> operands_of(const DecodeLinearArgs& args) {
  const DecodeLinearOptions& options = args.options;
  const auto data_of = [](const Tensor& t) { return t.defined() ? t.raw_data() : nullptr; };
  Operands<Weights> a{.x = map_of(args.x, kRows),
                      .weights = {},
                      .scales = {},
                      .parts = {},
                      .part_count = static_cast<int>(args.weights.size()),
                      .norm = data_of(options.norm_weight),
                      .residual = data_of(options.residual),
                      .y = args.y.raw_data(),
                      .rows = static_cast<int>(args.x.size(0)),
                      .columns = static_cast<int>(args.y.size(1)),
                      .depth = static_cast<int>(args.x.size(1)),
                      .eps = static_cast<float>(options.eps)};
  std::int64_t column = 0;
  for (int i = 0; i < a.part_count; ++i) {
    const DecodeWeight& w = args.weights[static_cast<std::size_t>(i)];
    map_weight<Weights, kSwiglu>(a, i, w);
    a.parts[i] = {.first_column = kSwiglu ? 0 : static_cast<int>(column), .bias = data_of(w.bias)};
    column += w.out();
  }
  return a;
}

/// Calls f.operator()<Weights>() with the kind of weights. Packed weights have kUnits slices per stage.
template <class T, int kUnits, class F>
void on_weights(const DecodeWeight& first, const F& f) {
  if (first.matrix.defined()) {
    f.template operator()<FloatWeights<T>>();
  } else if (first.quantized.bits == 4) {
    f.template operator()<PackedWeights<T, 4, kUnits>>();
  } else {
    f.template operator()<PackedWeights<T, 8, kUnits>>();
  }
}

/// Calls f.operator()<kNorm, kSwiglu>().
template <class F>
void on_options(const DecodeLinearOptions& options, const F& f) {
  const bool norm = options.norm_weight.defined();
  if (options.swiglu) {
    norm ? f.template operator()<true, true>() : f.template operator()<false, true>();
  } else {
    norm ? f.template operator()<true, false>() : f.template operator()<false, false>();
  }
}

}  // namespace mica::kernels::slices
