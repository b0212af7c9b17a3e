#pragma once

// The kinds of weights in the products of few rows by wgmma (decode_linear_batch_sm90.cu, decode_linear_wide_sm90.cu):
// how the copy engine loads them into a stage of the ring, and how they become operands of the tensor cores.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/detail/tensor_copy.cuh>
#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/infer/kernels/detail/kernels.h>
#include <mica/infer/kernels/detail/packed_pair.cuh>

namespace mica::kernels::slices {

using cuda::Lines;

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kOutputs = 64;
inline constexpr int kTerms = 64;
inline constexpr int kLineBytes = 128;

/// The columns of y that 64 outputs of the weights give.
template <bool kSwiglu>
inline constexpr int kColumns = kSwiglu ? kOutputs / 2 : kOutputs;

/// Weights of type T, which the tensor cores read from the stage directly. A stage has one slice.
template <class Element>
struct FloatWeights {
  using T = Element;
  static constexpr bool kIsPacked = false;
  static constexpr int kUnits = 1;      // slices per stage
  static constexpr int kConsumers = 2;  // warpgroups of decode_linear_wide() that multiply
  static constexpr bool kTakesFewRows = true;
  static constexpr int kStageBytes = kOutputs * kLineBytes;
  static constexpr int kScaleBytes = 0;
  static constexpr int kCopiedBytes = kStageBytes;
  struct Scales {};

  /// The output that is row g + 8 i of the first operand of warp `warp`.
  __device__ static int output(int warp, int g, int i) { return warp * 16 + g + 8 * i; }
};

/// Weights of 4 or 8 bits. A word holds adjacent terms of one output. A stage has the words of one or two slices in the
/// order in which they are stored, 32 outputs in a line of 128 bytes: first the lines of outputs 0 to 31, then those of
/// outputs 32 to 63. The scales and zeros of a stage are elsewhere in shared memory. With the scale s and the zero z of
/// a slice,
///
///     sum += s · (Σ x · (q + b) − (z + b) · Σ x)        b: what the conversion to T adds to an integer
template <class Element, int kBitsOf, int kUnitsOf>
struct PackedWeights {
  using T = Element;
  static constexpr bool kIsPacked = true;
  static constexpr int kBits = kBitsOf;
  static constexpr int kUnits = kUnitsOf;
  static constexpr int kConsumers = 4;  // warpgroups of decode_linear_wide(): more, since they convert integers
  static constexpr bool kTakesFewRows = kBits > 4;  // 4 bits: see few_rows_kernel() in decode_linear.cpp
  static constexpr int kSliceLines = kTerms * kBits / 32;
  static constexpr int kLines = kUnits * kSliceLines;
  static constexpr int kHalfOutputs = kLineBytes / 4;
  static constexpr int kHalfBytes = kLines * kLineBytes;
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static constexpr int kFactorBytes = 256;              // of the scales, or the zeros, of up to two slices
  static constexpr int kScaleBytes = 2 * kFactorBytes;  // per stage
  static constexpr int kCopiedBytes = kStageBytes + 2 * kUnits * kOutputs * 2;
  static constexpr float kAdded = kPackedAdded<T, kBits>;
  static_assert(kUnits == 1 || kUnits == 2);

  struct Scales {
    CUtensorMap scales[kMostDecodeWeights];  // (groups, outputs)
    CUtensorMap zeros[kMostDecodeWeights];
    int group_shift;  // a group has 2^group_shift slices
  };

  /// The output that is row g + 8 i of the first operand of warp `warp`. A warp reads either the even or the odd packs
  /// (16 bytes) of a line. With the swizzle, lanes that read adjacent lines therefore use different banks.
  __device__ static int output(int warp, int g, int i) {
    return warp / 2 * kHalfOutputs + g / 2 * 8 + warp % 2 * 4 + g % 2 * 2 + i;
  }

  /// Starts to copy the scales and zeros of a stage, whose first slice is `slice`.
  template <bool kSwiglu>
  __device__ static void load_scales(unsigned char* to, const Scales& s, int part, int column, int slice,
                                     std::uint64_t* full) {
    const int line = slice >> s.group_shift;
    if constexpr (kSwiglu) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cuda::load_tile(to + half * kFactorBytes / 2, &s.scales[half], column, line, full);
        cuda::load_tile(to + kFactorBytes + half * kFactorBytes / 2, &s.zeros[half], column, line, full);
      }
    } else {
      cuda::load_tile(to, &s.scales[part], column, line, full);
      cuda::load_tile(to + kFactorBytes, &s.zeros[part], column, line, full);
    }
  }

  /// What a lane has of a slice: the first operand, and scales and zeros of two outputs.
  struct Fragment {
    std::uint32_t pairs[kTerms / 16][4];
    std::uint32_t scales, zeros;

    using Pairs = std::uint32_t[4];
    __device__ const Pairs& operator()(int step) const { return pairs[step]; }

    __device__ void pin() {
#pragma unroll
      for (auto& step : pairs) {
        cuda::pin(step);
      }
    }

    /// Adds a slice's products to `sums`. of_slice are its sums of the integers times x; x_sum(j) returns its sums of x
    /// for rows 8 j + 2 t and 8 j + 2 t + 1 of x.
    template <int kSums, class F>
    __device__ void add(float (&sums)[kSums], const float (&of_slice)[kSums], const F& x_sum) const {
      float scale[2];
      float zero[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = static_cast<float>(reinterpret_cast<const T*>(&scales)[i]);
        zero[i] = static_cast<float>(reinterpret_cast<const T*>(&zeros)[i]) + kAdded;
      }
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const float2 x = x_sum(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[4 * j + i] += scale[i / 2] * (of_slice[4 * j + i] - zero[i / 2] * (i % 2 == 0 ? x.x : x.y));
        }
      }
    }
  };

  /// Reads a lane's fragments. Lane (g, t) has terms 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16.
  template <bool kSwiglu>
  struct Reader {
    static constexpr int kLineTerms = 32 / kBits;
    int words;        // offset in a stage of the lane's first line, plus that in a pack, in bytes
    int pack;         // index of the pack in the line, swizzled for the first line
    int factors;      // offset in the scales, or the zeros, in bytes
    unsigned select;  // selector of __byte_perm

    __device__ explicit Reader(int thread) {
      const int warp = thread / kWarp;
      const int g = thread % kWarp / 4;
      const int t = thread % 4;
      const int line = 2 * t / kLineTerms;  // of the first two terms
      const int first = output(warp, g, 0);
      words = warp / 2 * kHalfBytes + line * kLineBytes + g % 2 * 8;
      pack = (g / 2 * 2 + warp % 2) ^ line;
      factors = kSwiglu ? warp / 2 * (kFactorBytes / 2) + first % kHalfOutputs * 2 : first * 2;
      if constexpr (kBits == 4) {
        select = 0x4440 | t;
      } else if constexpr (std::is_same_v<T, Float16>) {
        select = t % 2 == 0 ? 0x4140 : 0x4342;
      } else {
        select = 0x7440 | (2 * (t % 2));
      }
    }

    /// This lane's two integers of a word, plus kAdded, as T.
    __device__ std::uint32_t pair(std::uint32_t word) const {
      if constexpr (kBits == 4) {
        constexpr std::uint32_t kPower = std::is_same_v<T, Float16> ? 0x64006400 : 0x43004300;
        return ((__byte_perm(word, 0, select) * 0x1001) & 0x000f000f) | kPower;
      } else if constexpr (std::is_same_v<T, Float16>) {
        return __byte_perm(word, 0x64646464, select);
      } else {
        // Converts to float32, whose upper half is the exact bfloat16, since the integer has only 8 bits.
        const auto number = [&](unsigned selected) {
          return __float_as_uint(__uint_as_float(__byte_perm(word, 0x4b000000, selected)) - 8388608.0f);
        };
        return __byte_perm(number(select), number(select + 1), 0x7632);
      }
    }

    __device__ void load(Fragment& f, const unsigned char* stage, const unsigned char* scales, int unit,
                         int group_shift) const {
      constexpr int kStepLines = 16 / kLineTerms;  // 4 or 2
#pragma unroll
      for (int step = 0; step < kTerms / 16; ++step) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int line = step * kStepLines + k * (kStepLines / 2);
          const unsigned char* const from =
              stage + words + (unit * kSliceLines + line) * kLineBytes + ((pack ^ (line % 8)) * 16);
          const uint2 two = *reinterpret_cast<const uint2*>(from);
          f.pairs[step][2 * k] = pair(two.x);
          f.pairs[step][2 * k + 1] = pair(two.y);
        }
      }
      const int at = factors + (group_shift == 0 ? unit : 0) * (kSwiglu ? kHalfOutputs : kOutputs) * 2;
      f.scales = *reinterpret_cast<const std::uint32_t*>(scales + at);
      f.zeros = *reinterpret_cast<const std::uint32_t*>(scales + kFactorBytes + at);
      f.pin();  // the conversion must stay here, where other products run, and not move behind the wait for them
    }
  };
};

/// Starts to multiply the first operand by a slice of x; pairs_of(step) returns 16 terms of the first operand. Called
/// by a warpgroup. Does not commit the group of products.
template <class T, int kRows, class F>
__device__ void multiply_pairs(float (&sums)[kRows / 2], const F& pairs_of, const unsigned char* x) {
  std::uint64_t b = cuda::depth_lines(x);
#pragma unroll
  for (int step = 0; step < kTerms / 16; ++step) {
    cuda::multiply_add<T, kRows, Lines::depth>(sums, pairs_of(step), b, step > 0);
    b += cuda::kNextDepth<Lines::depth>;
  }
}

}  // namespace mica::kernels::slices
