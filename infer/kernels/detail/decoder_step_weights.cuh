#pragma once

// The decoder step's kinds of weights: how they are copied to stages, and how they become operands of the tensor cores.
// See decoder_step_sm90.cu.

#include <cstdint>

#include <mica/core/cuda/detail/mma.cuh>
#include <mica/core/cuda/detail/tensor_copy.cuh>
#include <mica/infer/kernels/detail/decoder_step_jobs.cuh>
#include <mica/infer/kernels/detail/packed_pair.cuh>

namespace mica::kernels::decoder {

struct Octet {
  std::uint32_t pairs[4];
};
__device__ inline Octet load_octet(const void* from) {
  const uint4 bits = *static_cast<const uint4*>(from);
  return {{bits.x, bits.y, bits.z, bits.w}};
}

/// A lane's elements of a slice of x, for the second operand of the tensor cores. The first operand has 16 rows, but
/// only 8 rows of weights are multiplied at a time, so each of them takes two rows of the operand: pairs 0 and 2 of a
/// lane's octet are in row g, pairs 1 and 3 in row g + 8. Even columns of the second operand have the elements of x for
/// pairs 0 and 2, odd columns those for pairs 1 and 3, so the product is the sum of results (g, 0) and (g + 8, 1). In
/// shared memory, the pairs of an octet of x are in the order 0, 2, 1, 3.
struct LaneX {
  uint2 pairs[kSliceChunks];

  __device__ void load(const void* slice, int lane) {
    const auto* const from = static_cast<const uint2*>(slice) + lane % 4 * 2 + lane / 4 % 2;
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
      pairs[c] = from[c * kChunk / kQuad];
    }
  }
};

/// Weights of type T. A stage has up to 1,024 terms of each of 8 rows.
template <class T>
struct FloatWeights {
  static constexpr bool kIsPacked = false;
  static constexpr int kUnit = 2;                                             // outputs, since a word has two
  static constexpr int kPitch = kSegment * static_cast<int>(sizeof(T)) + 64;  // bytes per row; no bank conflicts
  static constexpr int kStageBytes = kStageRows * kPitch;
  static constexpr int kStageGroups = 1;
  static constexpr int kExtra = 0;
  static constexpr int kCopiersInTurn = 2;  // warps that copy alternately
  static_assert(kStagesInFlight % kCopiersInTurn == 0 && kHeadStagesInFlight % kCopiersInTurn == 0);
  static constexpr int kArrivals = kStageRows;  // arrivals per stage: one for each row

  /// Starts to copy a stage; called by one warp. Two warps alternate, since issuing a bulk copy takes about 50 cycles.
  __device__ static void copy(const Arguments<T>&, const Job<T>& job, int group, int, int segment, int copier,
                              const Ring& ring) {
    const int lane = copier % kWarp;
    const auto row = job.split.row(job.product, lane < kStageRows ? group * kStageRows + lane : 1 << 30);
    const int depth = job.product.depth;
    const int bytes = min(kSegment, depth - segment * kSegment) * static_cast<int>(sizeof(T));
    std::uint64_t* const full = ring.full + ring.stage;
    if (row.weight != nullptr) {
      const T* const from =
          static_cast<const T*>(row.weight->data) + static_cast<std::int64_t>(row.row) * depth + segment * kSegment;
      cuda::arrive_expecting(full, bytes);
      cuda::load_bytes(ring.here() + lane * kPitch, from, bytes, full);
    } else if (lane < kStageRows) {
      cuda::arrive(full);
    }
  }

  // A lane's part of a slice: an octet of row g in each chunk.
  struct Fragment {
    Octet chunks[kSliceChunks];
  };

  /// Past the product's depth, the stage has old contents. They are finite, and x is 0 there, so they add nothing.
  __device__ static void load(Fragment& f, const char* stage, int, int warp, int lane, int) {
    const char* const from =
        stage + lane / 4 * kPitch + (warp * kSlice + lane % 4 * kOctet) * static_cast<int>(sizeof(T));
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
      f.chunks[c] = load_octet(from + c * kChunk * static_cast<int>(sizeof(T)));
    }
  }

  __device__ static float multiply(const Fragment& f, const LaneX& x, const float*) {
    float sums[4] = {};
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
      cuda::multiply_add_16_8_16<T>(sums, f.chunks[c].pairs, x.pairs[c].x, x.pairs[c].y);
    }
    return sums[0] + sums[3];
  }
};

/// Weights of 4 or 8 bits. A word holds adjacent terms of one output. With the scale s and the zero z of a group,
///
///     sum += s · (Σ x · (q + b) − (z + b) · Σ x)        b: what the conversion to T adds to an integer
template <class T, int kBits>
struct PackedWeights {
  static constexpr bool kIsPacked = true;
  static constexpr int kUnit = kStageRows;
  static constexpr int kStageGroups = 4;
  static constexpr int kExtra = kBits == 4 ? kStageGroups : 0;
  static constexpr int kCopiersInTurn = 1;
  static constexpr int kOctetWords = kBits / 4;
  static constexpr int kWordRows = kSegment / kOctet * kOctetWords;
  static constexpr int kGroups = kSegment / kGroupTerms;  // of a segment, each with a scale and a zero in the stage
  static constexpr int kWordBytes = kWordRows * kStageRows * 4;
  static constexpr int kScaleBytes = kGroups * kStageRows * static_cast<int>(sizeof(T));
  // The words, scales and zeros of 8 outputs, padded against bank conflicts.
  static constexpr int kGroupBytes = kWordBytes + 2 * kScaleBytes + 32;
  static constexpr int kStageBytes = kStageGroups * kGroupBytes;
  static constexpr int kArrivals = kCopiers;
  static constexpr float kAdded = kPackedAdded<T, kBits>;

  /// Starts to copy `count` groups of rows to a stage. Called by all copying threads.
  __device__ static void copy(const Arguments<T>& a, const Job<T>& job, int group, int count, int segment, int copier,
                              const Ring& ring) {
    // 16 bytes are 4 outputs of a row of words, or 8 of a row of scales. Adjacent threads copy adjacent bytes.
    const int columns = count == 1 ? 2 : 2 * kStageGroups;
    const int rows = kCopiers / columns;  // at once
    const int column = copier % columns;
    const int first = copier / columns;
    const int mine = column / 2;
    const int half = column % 2;
    if (mine < count) {
      const auto row = job.split.row(job.product, (group + mine) * kStageRows);  // units are whole groups
      const Weight<T>& w = *row.weight;
      const int outputs = w.outputs;
      const int terms = min(kSegment, job.product.depth - segment * kSegment);
      const std::uint32_t group_start = cuda::shared_address(ring.here()) + mine * kGroupBytes;
      const int word_rows = terms / kOctet * kOctetWords;
      const auto* from = static_cast<const std::uint32_t*>(w.data) +
                         static_cast<std::int64_t>(segment * kWordRows + first) * outputs + row.row + half * 4;
      std::uint32_t to = group_start + first * kStageRows * 4 + half * 16;
#pragma unroll 4
      for (int i = first; i < word_rows; i += rows) {
        cuda::copy_async<16>(to, from);
        from += static_cast<std::int64_t>(rows) * outputs;
        to += rows * kStageRows * 4;
      }
      for (int i = first * 2 + half; i < 2 * kGroups; i += 2 * rows) {
        if (i % kGroups * kGroupTerms < terms) {
          const int at = (segment * kGroups + i % kGroups) >> a.group_shift;
          const T* const scales = (i < kGroups ? w.scale : w.zero) + static_cast<std::int64_t>(at) * outputs + row.row;
          cuda::copy_async<16>(group_start + kWordBytes + i * kStageRows * static_cast<int>(sizeof(T)), scales);
        }
      }
    }
    arrive_after_copies(ring.full + ring.stage);
  }

  // A lane's part of a slice: an octet of output g in each chunk.
  struct Fragment {
    std::uint32_t words[kSliceChunks][kOctetWords];
    float scales[kSliceGroups];
    float zeros[kSliceGroups];  // plus kAdded
  };

  __device__ static void load(Fragment& f, const char* stage, int group, int warp, int lane, int terms) {
    const char* const group_start = stage + group * kGroupBytes;
    const auto* const words = reinterpret_cast<const std::uint32_t*>(group_start);
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
#pragma unroll
      for (int w = 0; w < kOctetWords; ++w) {
        const int octet = (warp * kSlice + c * kChunk) / kOctet + lane % 4;
        f.words[c][w] = words[(octet * kOctetWords + w) * kStageRows + lane / 4];
      }
    }
    const T* const scales =
        reinterpret_cast<const T*>(group_start + kWordBytes) + warp * kSliceGroups * kStageRows + lane / 4;
#pragma unroll
    for (int i = 0; i < kSliceGroups; ++i) {
      f.scales[i] = static_cast<float>(scales[i * kStageRows]);
      f.zeros[i] = static_cast<float>(scales[(kGroups + i) * kStageRows]) + kAdded;
      if (i * kGroupTerms >= terms) {
        f.scales[i] = 0;
        f.zeros[i] = 0;
      }
    }
  }

  __device__ static float multiply(const Fragment& f, const LaneX& x, const float* x_sums) {
    float result = 0;
#pragma unroll
    for (int i = 0; i < kSliceGroups; ++i) {
      float sums[4] = {};
#pragma unroll
      for (int c = i * kGroupTerms / kChunk; c < (i + 1) * kGroupTerms / kChunk; ++c) {
        const std::uint32_t pairs[4] = {packed_pair<T, kBits>(f.words[c], 0), packed_pair<T, kBits>(f.words[c], 1),
                                        packed_pair<T, kBits>(f.words[c], 2), packed_pair<T, kBits>(f.words[c], 3)};
        cuda::multiply_add_16_8_16<T>(sums, pairs, x.pairs[c].x, x.pairs[c].y);
      }
      result += f.scales[i] * (sums[0] + sums[3] - f.zeros[i] * x_sums[i]);
    }
    return result;
  }
};

}  // namespace mica::kernels::decoder
