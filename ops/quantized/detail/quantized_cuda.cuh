#pragma once

// How the CUDA kernels without tensor cores read packed weights. Included by .cu files only.

#include <bit>
#include <cstdint>

#include <mica/ops/quantized/detail/quantized_functions.h>
#include <mica/ops/quantized/detail/quantized_kernels.h>

namespace mica::kernels::quantized_cuda {

inline constexpr int kColumns = 4;  // per thread, so that it reads 16 bytes of words
inline constexpr int kSimpleThreads = 256;

inline unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kSimpleThreads - 1) / kSimpleThreads);
}

// Elements whose type is known only at run time. That is fast enough for scales and zeros, which are few.
struct Values {
  static constexpr bool kTwoLevels = true;  // whether there may be factors: see QuantizedWeight
  const void* data = nullptr;
  DType dtype = DType::float32;

  Values() = default;
  explicit Values(const Tensor& x) {
    if (x.defined()) {
      data = x.raw_data();
      dtype = x.dtype();
    }
  }

  template <class S>
  __device__ S at(std::int64_t i) const {
    switch (dtype) {
      case DType::float64: return static_cast<S>(static_cast<const double*>(data)[i]);
      case DType::float32: return static_cast<S>(static_cast<const float*>(data)[i]);
      case DType::float16: return static_cast<S>(static_cast<float>(static_cast<const Float16*>(data)[i]));
      case DType::uint8:
        return static_cast<S>(static_cast<int>(static_cast<const std::uint8_t*>(data)[i]) - quantized::kFactorZero);
      default: return static_cast<S>(static_cast<float>(static_cast<const BFloat16*>(data)[i]));
    }
  }
};

// Elements whose type is known at compile time.
template <class T>
struct Numbers {
  static constexpr bool kTwoLevels = false;
  const T* data = nullptr;

  explicit Numbers(const Tensor& x) : data(x.defined() ? x.data<T>() : nullptr) {}

  template <class S>
  __device__ S at(std::int64_t i) const {
    return data[i];
  }
};

// Every mode is computed as (q − zero) · scale + offset, with zero = 0, scale = 1 or offset = 0 for what it lacks.
template <class S>
struct Grid {
  S zero;
  S scale;
  S offset;
};

/// A packed weight. Its scales and zeros are read by a Source, Values or Numbers.
template <class Source>
struct Weights {
  const std::uint32_t* words;
  Source scale;
  Source zero;
  Source scale_factor;
  Source zero_factor;
  bool one_zero;
  bool adds;
  bool aligned;  // whether four adjacent words can be read at once
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t word_rows;
  int group_shift;  // a group has 2^group_shift rows, or more than there are

  explicit Weights(const QuantizedWeight& q)
      : words(reinterpret_cast<const std::uint32_t*>(q.packed.data<std::int32_t>())),
        scale(q.scale),
        zero(q.zero),
        scale_factor(q.scale_factor),
        zero_factor(q.zero_factor),
        one_zero(q.zero.defined() && q.zero.dim() == 0),
        adds(q.mode == QuantizationMode::fused_multiply_add),
        aligned(q.columns() % kColumns == 0 && reinterpret_cast<std::uintptr_t>(words) % 16 == 0),
        rows(q.rows),
        columns(q.columns()),
        word_rows(q.packed.size(0)),
        group_shift(q.group_size == kWholeColumn ? 62 : std::countr_zero(static_cast<std::uint64_t>(q.group_size))) {}

  /// Of the group that has `row`.
  template <class S>
  __device__ Grid<S> grid(std::int64_t row, std::int64_t column) const {
    Grid<S> g{0, 0, 0};
    if (column < columns) {
      const std::int64_t at = (row >> group_shift) * columns + column;
      S z = zero.data == nullptr ? S{0} : zero.template at<S>(one_zero ? 0 : at);
      g.scale = scale.data == nullptr ? S{1} : scale.template at<S>(at);
      if constexpr (Source::kTwoLevels) {
        const std::int64_t of_factor = row / quantized::kFactorRows * columns + column;
        g.scale *= scale_factor.data == nullptr ? S{1} : scale_factor.template at<S>(of_factor);
        z *= zero_factor.data == nullptr ? S{1} : zero_factor.template at<S>(of_factor);
      }
      g.zero = adds ? S{0} : z;
      g.offset = adds ? z : S{0};
    }
    return g;
  }

  /// Loads the words of four adjacent columns; words outside of the matrix are zero.
  __device__ void load(std::int64_t row, std::int64_t column, std::uint32_t (&to)[kColumns]) const {
    const std::uint32_t* const from = words + row * columns + column;
    if (row >= word_rows || column >= columns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        to[c] = 0;
      }
    } else if (aligned) {
      asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
          : "l"(from));
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        to[c] = column + c < columns ? from[c] : 0;
      }
    }
  }
};

/// The integer at bit `bit` of a word as a float. Its bits become the top bits of the fraction of a float, which takes
/// a quarter of the time of a conversion instruction.
template <int kBits>
__device__ float integer_at(std::uint32_t word, int bit) {
  constexpr int kFirst = 23 - kBits;
  constexpr std::uint32_t kMask = ((1u << kBits) - 1) << kFirst;
  constexpr std::uint32_t kPower = static_cast<std::uint32_t>(127 + kBits) << 23;
  const std::uint32_t moved = bit >= kFirst ? word >> (bit - kFirst) : word << (kFirst - bit);
  return __uint_as_float((moved & kMask) | kPower) - static_cast<float>(1 << kBits);
}

/// out = weight · columns, for out (K, N) of any floating dtype; `columns` may be undefined.
void dequantize_into(const QuantizedWeight& weight, const Tensor& columns, const Tensor& out);

/// x, or a copy in a dtype that the kernels support. For scales and zeros, which are few, copying takes little time.
Tensor converted(const Tensor& x, DType dtype);

}  // namespace mica::kernels::quantized_cuda
