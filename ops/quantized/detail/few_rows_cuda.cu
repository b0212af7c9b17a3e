// Products of few 16-bit rows with a quantized weight, on tensor cores. They are limited by reading the weight. A
// cluster computes a strip of 64 columns, and each warp of its blocks has its own part of K:
//
//     global memory ── cp.async, several steps ahead ──▶ the warp's ring of stages in shared memory
//                   ──▶ integers converted to 16-bit floats in registers ── mma ──▶ the warp's sums
//
// Warps synchronize only after all products, to add up their sums.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/detail/mma.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/quantized/detail/product_cuda.cuh>
#include <mica/ops/quantized/detail/quantized_cuda.cuh>
#include <mica/ops/quantized/detail/tensor_cores_cuda.cuh>

namespace mica::kernels::quantized_cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kHalf = 32;  // columns of half a strip: 4 adjacent columns for each of 8 threads
constexpr int kHalves = 2;
constexpr int kStrip = kHalves * kHalf;  // columns of a cluster, and of each of its blocks and warps
constexpr int kWordPacks = kStrip / 4;   // packs of 16 bytes in a row of words
constexpr int kUnits = 2;                // units (kUnit rows of the weight) per step
constexpr int kStep = kUnits * kUnit;    // rows of the weight per step of a warp
constexpr int kTile = 8;                 // rows of x per mma instruction
constexpr int kPitch = kStrip + 4;       // floats from one row of sums in shared memory to the next; no bank conflicts
constexpr int kMaxSplits = 8;            // the most blocks of a cluster

// An octet is 8 consecutive integers along K of one column, in one thread: a word of 4-bit integers, two words of 8-bit
// ones, or a part of a word. Its pair c is its members c and c + 4, as two 16-bit floats in a register.

template <int kBits>
constexpr int kWordsEach = kBits == 8 ? 2 : 1;

/// Rearranges octet number `octet` of a unit such that the lowest bits of its members c and c + 4 are 16 bits apart.
template <class T, int kBits>
__device__ std::uint32_t spread(std::uint32_t word, int octet) {
  if constexpr (kBits == 2) {
    const std::uint32_t first = octet % 2 * 2;
    return bytes_of(word, 0, 0x4040 | first | (first + 1) << 8);
  } else if constexpr (kBits == 1) {
    return bytes_of(word, 0, 0x4440 | octet) *
           (0x1001u << (kFraction<T> - 4));  // puts member 3 into the highest bits of the fraction
  } else {
    return word;
  }
}

// The position of an integer's lowest bit in a float's fraction (mantissa): that of a pair in a rearranged octet, so
// that this pair needs no shift.
template <class T, int kBits>
constexpr int kPosition = kBits == 8   ? 0
                          : kBits == 1 ? kFraction<T> - 1
                                       : (kFraction<T> / kBits - 1 < 3 ? kFraction<T> / kBits - 1 : 3) * kBits;

// What pair_at() adds to an integer q: with q in its fraction, the float is q + kAdded.
template <class T, int kBits>
constexpr int kAdded = kBits == 8 && std::is_same_v<T, BFloat16> ? 0 : 1 << (kFraction<T> - kPosition<T, kBits>);

/// Pair c of an octet: two integers, each plus kAdded, as T.
template <class T, int kBits>
__device__ std::uint32_t pair_at(const std::uint32_t (&octet)[kWordsEach<kBits>], int c) {
  if constexpr (kAdded<T, kBits> == 0) {
    return as_bfloat16(octet[0], kByteOfFloat | c, octet[1], kByteOfFloat | c);
  } else {
    constexpr int kFirst = kPosition<T, kBits>;
    const std::uint32_t both = kBits == 8 ? bytes_of(octet[0], octet[1], 0x0400 | c << 8 | c) : octet[0];
    const int at = kBits == 8 ? 0 : kBits == 1 ? kFraction<T> - 4 + c : c * kBits;
    return as_fractions<T, kBits, kFirst>(at < kFirst ? both << (kFirst - at) : both >> (at - kFirst));
  }
}

// The octets of a thread's columns in one unit.
template <class T, int kBits, int kColumnsEach>
struct Octets {
  std::uint32_t words[kColumnsEach][kWordsEach<kBits>];

  /// `address` is that of this thread's first word.
  __device__ void load(std::uint32_t address, int pitch, int octet) {
    std::uint32_t rows[kWordsEach<kBits>][kColumnsEach];
#pragma unroll
    for (int i = 0; i < kWordsEach<kBits>; ++i) {
      load_words(address + i * pitch, rows[i]);
    }
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c) {
#pragma unroll
      for (int i = 0; i < kWordsEach<kBits>; ++i) {
        words[c][i] = spread<T, kBits>(rows[i][c], octet);
      }
    }
  }

  /// The mma fragment of columns 2 half and 2 half + 1, for one of a unit's two steps.
  __device__ void get(int half, int step, std::uint32_t (&fragment)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[i] = pair_at<T, kBits>(words[2 * half + i % 2], 2 * step + i / 2);
    }
  }
};

/// The number of warps per multiprocessor, and the most per block, as limited by registers.
template <int kBits>
constexpr int kMaxWarps = kBits == 8 ? 12 : 16;

/// The layout of a stage, which holds a warp's data for one step. A warp has a ring of stages.
template <int kBits, int kTiles>
struct Stage {
  static constexpr int kWordRows = kStep * kBits / 32;
  static constexpr int kWordPitch = kStrip * 4 + (kBits == 8 ? 16 : 32);  // bytes, padded against bank conflicts
  static constexpr int kXAt = kWordRows * kWordPitch;
  static constexpr int kXBytes = kUnits * kTiles * kWarp * 16;  // 16 for each lane, which only that lane uses
  static constexpr int kFactorsAt = kXAt + kXBytes;
  // As many stages as fit if scales and zeros have 16 bits and groups are not shorter than a step.
  static constexpr int kRoom = (224 << 10) / kMaxWarps<kBits>;  // bytes per warp
  static constexpr int kStages = std::clamp(kRoom / (kFactorsAt + 2 * kStrip * 2), 2, 8);
  static_assert(kStages * kFactorsAt >= kTiles * kTile * kPitch * 4);
};

/// Sizes known at run time, in bytes.
struct Sizes {
  int scales;   // the scales of a group in all columns of a strip
  int factors;  // these and the zeros
  int stage;

  template <class S>
  static Sizes of(const Product& a) {
    const auto size = [](const FactorMatrix& f) { return f.each() ? kStrip * f.size() : 0; };
    Sizes result{};
    result.scales = size(a.grids.scale);
    result.factors = result.scales + size(a.grids.zero);
    result.stage = S::kFactorsAt + (a.group_shift == 5 ? kUnits : 1) * result.factors;
    return result;
  }
};

/// Copies a lane's part of a step's data: packs of words, packs of the scales or the zeros, and its fragments of x.
template <class T, int kBits, int kTiles>
class Copier {
  using S = Stage<kBits, kTiles>;
  static constexpr int kRowsAtOnce = kWarp / kWordPacks;  // rows of words that the lanes copy at once

 public:
  __device__ Copier(const Product& a, const T* x, const Sizes& sizes, int strip, int chunk, int warps)
      : sizes_(sizes), full_chunks_(a.rows / kStep) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int pack = lane % kWordPacks;
    row_ = lane / kWordPacks;
    words_ = a.words + (std::int64_t{chunk} * S::kWordRows + row_) * a.columns + strip + pack * 4;
    words_pitch_ = a.columns;
    words_step_ = std::int64_t{warps * S::kWordRows} * a.columns;
    words_to_ = row_ * S::kWordPitch + pack * 16;
    inside_ = strip + pack * 4 < a.columns;

    const bool scales = lane < kWarp / 2;
    const FactorMatrix& factors = scales ? a.grids.scale : a.grids.zero;
    const int in_row = lane % (kWarp / 2) * 16;
    has_factors_ = factors.each() && in_row < kStrip * factors.size() && strip + in_row / factors.size() < a.columns;
    each_unit_ = a.group_shift == 5;
    factors_pitch_ = std::int64_t{a.columns} * factors.size();
    factors_step_ = (warps * kStep >> a.group_shift) * factors_pitch_;
    factors_ = static_cast<const std::byte*>(factors.data) + std::int64_t{strip} * factors.size() + in_row +
               (chunk * kStep >> a.group_shift) * factors_pitch_;
    factors_to_ = S::kFactorsAt + (scales ? 0 : sizes.scales) + in_row;

    x_ = x + std::int64_t{lane / 4} * a.rows + chunk * kStep + lane % 4 * 8;
    x_pitch_ = std::int64_t{kTile} * a.rows;
    x_step_ = warps * kStep;
    x_to_ = S::kXAt + lane * 16;
    rows_ = a.m - lane / 4;
  }

  /// Clears the fragments of rows past the end of x.
  __device__ void clear_x(std::uint32_t ring) const {
    for (int stage = 0; stage < S::kStages; ++stage) {
#pragma unroll
      for (int i = 0; i < kUnits * kTiles; ++i) {
        if (i % kTiles * kTile >= rows_) {
          asm volatile(
              "st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(ring + stage * sizes_.stage + x_to_ + i * kWarp * 16),
              "r"(0)
              : "memory");
        }
      }
    }
  }

  /// Starts the copies of `chunk`, which must be this warp's next one. Elements past the ends of the matrices become
  /// zeros.
  __device__ void copy(int chunk, std::uint32_t stage) {
    const bool full = chunk < full_chunks_;  // the last chunk may have a single unit
#pragma unroll
    for (int i = 0; i < S::kWordRows; i += kRowsAtOnce) {
      const bool within = i + kRowsAtOnce <= kBits || full || i + row_ < kBits;
      cuda::copy_async<16>(stage + words_to_ + i * S::kWordPitch, words_ + std::int64_t{i} * words_pitch_,
                           inside_ && within);
    }
    words_ += words_step_;

#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile * kTile < rows_) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          cuda::copy_async<16>(stage + x_to_ + (u * kTiles + tile) * kWarp * 16, x_ + tile * x_pitch_ + u * kUnit,
                               u == 0 || full);
        }
      }
    }
    x_ += x_step_;

    if (has_factors_) {
      cuda::copy_async<16>(stage + factors_to_, factors_);
      if (each_unit_) {
        cuda::copy_async<16>(stage + factors_to_ + sizes_.factors, factors_ + factors_pitch_, full);
      }
    }
    factors_ += factors_step_;
  }

 private:
  const Sizes& sizes_;
  const std::uint32_t* words_;
  const std::byte* factors_;
  const T* x_;
  std::int64_t words_step_;
  std::int64_t factors_pitch_;
  std::int64_t factors_step_;
  std::int64_t x_pitch_;
  int words_pitch_;
  int x_step_;
  int full_chunks_;
  int row_;
  int rows_;  // rows of x, from the lane's first one on
  int words_to_;
  int factors_to_;
  int x_to_;
  bool inside_;
  bool has_factors_;
  bool each_unit_;
};

template <int kTiles>
using Sums = float[2 * kHalves][kTiles][4];

/// A power of 2 as T, in both halves of a register.
template <class T>
constexpr std::uint32_t pair_of_power(int power) {
  const int exponent = std::bit_width(static_cast<unsigned>(power)) - 1;
  return static_cast<std::uint32_t>(kBias<T> + exponent) << kFraction<T> << 16 |
         static_cast<std::uint32_t>(kBias<T> + exponent) << kFraction<T>;
}

/// The elements of x that a warp multiplies by kCount units of a group, and their sums times kTerm.
template <class T, int kBits, int kTiles, int kCount>
struct GroupOfX {
  static constexpr int kOffset = kAdded<T, kBits>;
  static constexpr std::uint32_t kTerm = kOffset != 0 ? pair_of_power<T>(kOffset) | 0x80008000 : pair_of_power<T>(1);
  static constexpr float kFromTerm = kOffset != 0 ? -1.0f / kOffset : 1.0f;

  std::uint32_t at[kCount][kTiles][4];
  float sums[kTiles][4] = {};

  __device__ void load(std::uint32_t stage, int first) {
    const std::uint32_t terms[4] = {kTerm, kTerm, kTerm, kTerm};
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        std::uint32_t in[4];
        load_words(stage + Stage<kBits, kTiles>::kXAt + (((first + u) * kTiles + tile) * kWarp + lane) * 16, in);
        auto& own = at[u][tile];
        own[0] = bytes_of(in[0], in[2], 0x5410);  // rearranged to match pairs of the weight: elements c and c + 4
        own[1] = bytes_of(in[0], in[2], 0x7632);
        own[2] = bytes_of(in[1], in[3], 0x5410);
        own[3] = bytes_of(in[1], in[3], 0x7632);
        cuda::multiply_add_16_8_16<T>(sums[tile], terms, own[0], own[1]);
        cuda::multiply_add_16_8_16<T>(sums[tile], terms, own[2], own[3]);
      }
    }
  }
};

/// parts = the products of x with the integers of kCount units, from unit `first` on.
template <class T, int kBits, int kTiles, int kCount>
__device__ void multiply_integers(const GroupOfX<T, kBits, kTiles, kCount>& x, std::uint32_t stage, int first,
                                  Sums<kTiles>& parts) {
  using S = Stage<kBits, kTiles>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int octet = lane % 4;
  const int column = lane / 4 * 4;  // in a half strip
  const float none[4] = {};
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Octets<T, kBits, 4> octets;
      octets.load(stage + ((first + u) * kBits + octet * kBits / 4) * S::kWordPitch + (half * kHalf + column) * 4,
                  S::kWordPitch, octet);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          std::uint32_t fragment[4];
          octets.get(pair, step, fragment);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            auto& part = parts[2 * half + pair][tile];
            const float(&start)[4] = x.kOffset != 0 ? x.sums[tile] : none;
            const float(&before)[4] = u > 0 || step > 0 ? std::as_const(part) : start;
            cuda::multiply_add_16_8_16<T>(part, fragment, x.at[u][tile][2 * step], x.at[u][tile][2 * step + 1], before);
          }
        }
      }
    }
  }
}

/// sums += the products of kCount units of a group, from unit `first` on. The tensor cores also sum x itself, to
/// correct the sums for kAdded and for the zeros.
template <class T, int kBits, int kTiles, int kCount>
__device__ void multiply_group(const Product& a, const Sizes& sizes, std::uint32_t stage, int first,
                               Sums<kTiles>& sums) {
  GroupOfX<T, kBits, kTiles, kCount> x;
  x.load(stage, first);
  Sums<kTiles> parts;
  multiply_integers(x, stage, first, parts);
  const int column = static_cast<int>(threadIdx.x) % kWarp / 4 * 4;  // in a half strip
  const std::uint32_t factors = stage + Stage<kBits, kTiles>::kFactorsAt + (first > 0 ? sizes.factors : 0);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int from = half * kHalf + column;
    const auto own = load_grids<T, 4>(a.grids, factors + from * a.grids.scale.size(),
                                      factors + sizes.scales + from * a.grids.zero.size());
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float x_sum[2] = {x.kFromTerm * x.sums[tile][0], x.kFromTerm * x.sums[tile][1]};
      const auto for_each = [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int c = i / 2;
          f(sums[2 * half + c / 2][tile][c % 2 * 2 + i % 2], parts[2 * half + c / 2][tile][c % 2 * 2 + i % 2], c,
            x_sum[i % 2]);
        }
      };
      if (a.grids.adds) {
        for_each([&](float& sum, float part, int c, float x_sum) {
          sum = fmaf(own.scale[c], part, fmaf(own.zero[c], x_sum, sum));
        });
      } else {
        for_each([&](float& sum, float part, int c, float x_sum) {
          sum = fmaf(own.scale[c], fmaf(-own.zero[c], x_sum, part), sum);
        });
      }
    }
  }
}

/// Writes a warp's sums to shared memory as (rows, kPitch).
template <int kTiles>
__device__ void write_sums(const Sums<kTiles>& sums, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile * kTile + lane % 4 * 2 + r;
        const auto& low = sums[2 * half][tile];
        const auto& high = sums[2 * half + 1][tile];
        *reinterpret_cast<float4*>(to + row * kPitch + half * kHalf + lane / 4 * 4) =
            make_float4(low[r], low[2 + r], high[r], high[2 + r]);
      }
    }
  }
}

/// Adds up the sums of a cluster's warps, in a fixed order, and stores the strip of y. The sums of a warp are in its
/// ring, those of the first warp at `block_sums`, where the block's result replaces them.
template <class T, int kTiles>
__device__ void merge_and_store(const Product& a, int strip, float* block_sums, int warp_floats) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const auto for_each = [&](int first, int step, const auto& f) {
    for (int i = first; i < min(a.m, kTiles * kTile) * kWordPacks; i += step) {
      f(i / kWordPacks, i % kWordPacks * 4);
    }
  };
  const auto store = [&](int row, int column, float4 sum) {
    if (strip + column < a.columns) {
      store_row<T>(a, row, strip + column, sum);
    }
  };
  for_each(static_cast<int>(threadIdx.x), threads, [&](int row, int column) {
    auto* const own = reinterpret_cast<float4*>(block_sums + row * kPitch + column);
    float4 sum = *own;
#pragma unroll 4
    for (int w = 1; w < warps; ++w) {
      sum = plus(sum, own[w * warp_floats / 4]);
    }
    if (splits == 1) {
      store(row, column, sum);
    } else {
      *own = sum;
    }
  });
  if (splits > 1) {
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
    for_each(split * threads + static_cast<int>(threadIdx.x), splits * threads, [&](int row, int column) {
      float4 sum = {};
      for (int from = 0; from < splits; ++from) {
        sum = plus(sum, cuda::load_four_from_block(block_sums + row * kPitch + column, from));
      }
      store(row, column, sum);
    });
    cuda::arrive_in_cluster_relaxed();  // a block must not exit while another one reads its shared memory
    cuda::wait_for_cluster();
  }
}

/// A cluster computes a strip of columns; each of its blocks has a part of K.
template <class T, int kBits, int kTiles>
__global__ void __launch_bounds__(kMaxWarps<kBits>* kWarp, 1)
    few_rows_tensor_kernel([[maybe_unused]] const __grid_constant__ Product a, [[maybe_unused]] const T* x,
                           [[maybe_unused]] const __grid_constant__ Sizes sizes) {
#if __CUDA_ARCH__ >= 900
  using S = Stage<kBits, kTiles>;
  extern __shared__ __align__(16) std::byte memory[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int strip = static_cast<int>(blockIdx.y) * kStrip;
  const int chunks = (a.rows + kStep - 1) / kStep;
  const int end = chunks * (split + 1) / splits;
  int chunk = chunks * split / splits + warp;

  const int ring_bytes = S::kStages * sizes.stage;
  const std::uint32_t ring = cuda::shared_address(memory) + warp * ring_bytes;
  Copier<T, kBits, kTiles> copier(a, x, sizes, strip, chunk, warps);
  int next = chunk;  // the next one to be copied
  const auto copy_next = [&](std::uint32_t to) {
    if (next < end) {
      copier.copy(next, to);
      next += warps;
    }
    cuda::commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < S::kStages - 1; ++i) {
    copy_next(ring + i * sizes.stage);
  }
  copier.clear_x(ring);

  Sums<kTiles> sums = {};
  int stage = 0;
  int free = ring_bytes - sizes.stage;  // the offset of the previous step's stage, which is free
#pragma unroll 1
  for (; chunk < end; chunk += warps) {
    cuda::wait_copies<S::kStages - 2>();
    __syncwarp();  // all lanes' copies are complete, and all lanes have read the previous step
    copy_next(ring + free);
    if (a.group_shift == 5) {
#pragma unroll 1
      for (int unit = 0; unit < kUnits; ++unit) {
        multiply_group<T, kBits, kTiles, 1>(a, sizes, ring + stage, unit, sums);
      }
    } else {
      multiply_group<T, kBits, kTiles, kUnits>(a, sizes, ring + stage, 0, sums);
    }
    free = stage;
    stage = stage + sizes.stage == ring_bytes ? 0 : stage + sizes.stage;
  }

  cuda::wait_copies<0>();
  __syncwarp();
  auto* const block_sums = reinterpret_cast<float*>(memory);
  write_sums<kTiles>(sums, block_sums + warp * ring_bytes / 4);
  __syncthreads();
  merge_and_store<T, kTiles>(a, strip, block_sums, ring_bytes / 4);
#endif
}

// On the host.

/// How K is split: into blocks per strip, and warps per block.
struct Split {
  int splits;
  int warps;
};

// The fastest split, according to a model with fixed costs per block and per cluster that does not depend on the GPU.
Split split_for(int strips, int steps, int most_warps, int warp_bytes) {
  constexpr int kMultiprocessors = 132;
  constexpr int kMaxBytes = 227 << 10;  // of shared memory, for all blocks of a multiprocessor; each takes 1 KB more
  constexpr int kBlockCost = 3;
  constexpr int kClusterCost = 2;
  Split best{};
  int least = INT32_MAX;
  for (const int warps : {16, 12, 8, 4}) {
    const int at_once =
        kMultiprocessors * std::min(most_warps / warps, (kMaxBytes + 1024) / (warps * warp_bytes + 1024));
    if (at_once == 0) {
      continue;
    }
    for (int splits = 1; splits <= std::min(kMaxSplits, std::max(1, steps / warps)); ++splits) {
      const int waves = (strips * splits + at_once - 1) / at_once;
      const int parts = splits * warps;
      const int cost = waves * ((steps + parts - 1) / parts + kBlockCost) + (splits > 1 ? kClusterCost : 0);
      if (cost < least) {
        least = cost;
        best = {.splits = splits, .warps = warps};
      }
    }
  }
  return best;
}

/// The bytes of a warp's ring of stages, which depend on the number of rows of x.
template <int kBits, int kTiles>
int ring_bytes(const Product& a) {
  using S = Stage<kBits, kTiles>;
  return S::kStages * Sizes::of<S>(a).stage;
}

template <class T, int kBits, int kTiles>
void launch(const Product& a, const T* x) {
  const int bytes = ring_bytes<kBits, kTiles>(a);
  // The split is the same for any number of rows of x, so that the bits of a row of y do not depend on that number.
  const int most_bytes = std::max(ring_bytes<kBits, 1>(a), ring_bytes<kBits, 2>(a));
  const int strips = (a.columns + kStrip - 1) / kStrip;
  const Split split = split_for(strips, (a.rows + kStep - 1) / kStep, kMaxWarps<kBits>, most_bytes);
  cuda::Launch(dim3(split.splits, strips), dim3(split.warps * kWarp), split.warps * bytes)
      .cluster(split.splits)
      .run(few_rows_tensor_kernel<T, kBits, kTiles>, "few_rows_tensor_kernel", a, x,
           Sizes::of<Stage<kBits, kTiles>>(a));
}

}  // namespace

void multiply_few_rows(const Tensor& x, int bits, const Product& a) {
  on_dtype(Types<Float16, BFloat16>{}, x.dtype(), "quantized_matmul", [&]<class T>() {
    quantized::on_bits(bits, [&]<int kBits>() {
      static_assert(kFewTensorRows == 2 * kTile);
      if (a.m <= kTile) {
        launch<T, kBits, 1>(a, x.data<T>());
      } else {
        launch<T, kBits, 2>(a, x.data<T>());
      }
    });
  });
}

}  // namespace mica::kernels::quantized_cuda
