#pragma once

// What the products of few rows by wgmma share. The weight is the first operand, 64 outputs at a time (SwiGLU: 32 of
// gate and the same 32 of up); the rows of x are the second. A piece has 64 terms of both, as lines of 128 bytes that
// the copy engine swizzles.

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/core/cuda/wgmma.cuh>
#include <mica/ops/decode/detail/decode_kernels.h>

namespace mica::kernels::pieces {

using cuda::Lines;

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kOutputs = 64;
inline constexpr int kTerms = 64;
inline constexpr int kLineBytes = 128;
inline constexpr int kWeightBytes = kOutputs * kLineBytes;
inline constexpr int kPacks = 8;  // of 16 bytes in a line
inline constexpr int kPackTerms = 8;
inline constexpr int kStride = kOutputs + 4;  // of sums in shared memory, so that lanes use different banks

/// The columns of y that belong to 64 outputs.
template <bool kSwiglu>
inline constexpr int kColumns = kSwiglu ? kOutputs / 2 : kOutputs;

struct Part {
  int first_column;
  const void* bias;  // or null
};

struct Operands {
  CUtensorMap x;
  CUtensorMap weights[kMostDecodeWeights];
  Part parts[kMostDecodeWeights];
  int part_count;
  const void* norm;      // or null
  const void* residual;  // or null
  void* y;
  int rows;
  int columns;  // of y
  int depth;
  float eps;
};

/// A ring of stages whose number the launch decides.
struct Ring {
  int stages;
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// The columns of a tile.
template <bool kSwiglu>
struct Place {
  int column;  // of y
  int part = 0;

  __device__ Place(const Operands& a, int tile) : column(tile * kColumns<kSwiglu>) {
    while (!kSwiglu && part + 1 < a.part_count && column >= a.parts[part + 1].first_column) {
      ++part;
    }
  }
};

/// Starts to copy a piece of the weights, the terms from `term` on.
template <bool kSwiglu>
__device__ void load_weights(unsigned char* to, const Operands& a, const Place<kSwiglu>& place, int term,
                             std::uint64_t* full) {
  if constexpr (kSwiglu) {
    cuda::load_tile(to, &a.weights[0], term, place.column, full);
    cuda::load_tile(to + kWeightBytes / 2, &a.weights[1], term, place.column, full);
  } else {
    cuda::load_tile(to, &a.weights[place.part], term, place.column - a.parts[place.part].first_column, full);
  }
}

/// Multiplies a pack of x by the norm's weight, and adds its squares to `squares`.
template <class T>
__device__ void scale_pack(T* at, const T* norm, float& squares) {
  float values[kPackTerms];
  float factors[kPackTerms];
  cuda::unpack(cuda::load<kPackTerms>(at), values);
  cuda::unpack(cuda::load<kPackTerms>(norm), factors);
#pragma unroll
  for (int j = 0; j < kPackTerms; ++j) {
    squares += values[j] * values[j];
    values[j] *= factors[j];
  }
  cuda::store(at, cuda::pack_of<T>(values));
}

/// A warpgroup starts to multiply a piece, as one group of products.
template <class T, int kRows>
__device__ void multiply_piece(float (&sums)[kRows / 2], const unsigned char* w, const unsigned char* x,
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

/// Writes a warpgroup's sums to shared memory, by row.
template <int kRows>
__device__ void store_sums(float (&to)[kRows][kStride], const float (&sums)[kRows / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarp;
  const int output = thread / kWarp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[8 * j + lane % 4 * 2 + i % 2][output + i / 2 * 8] = sums[4 * j + i];
    }
  }
}

/// Writes four floats to the same place of another block, whose *barrier counts their bytes when they have arrived.
__device__ inline void send_four(float* p, const float4& four, int rank, std::uint64_t* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cuda::address_in_block(p, rank)),
               "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(cuda::address_in_block(barrier, rank))
               : "memory");
}

__device__ inline float silu(float x) { return x / (1 + __expf(-x)); }

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

/// For x in tiles of kRows rows.
template <int kRows, bool kSwiglu>
Operands operands_of(const DecodeLinearArgs& args) {
  const DecodeLinearOptions& options = args.options;
  const auto data_of = [](const Tensor& t) { return t.defined() ? t.raw_data() : nullptr; };
  Operands a{.x = map_of(args.x, kRows),
             .weights = {},
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
    a.weights[i] = map_of(w.matrix, kColumns<kSwiglu>);
    a.parts[i] = {.first_column = kSwiglu ? 0 : static_cast<int>(column), .bias = data_of(w.bias)};
    column += w.out();
  }
  return a;
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

}  // namespace mica::kernels::pieces
