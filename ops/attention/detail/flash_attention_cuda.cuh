#pragma once

// Declarations shared by the kernels for all GPUs and those for compute capability 9.0.

#include <cstdint>

#include <mica/core/dtype.h>
#include <mica/core/rng.h>

namespace mica::kernels::flash {

/// A (batch, head, row, D) tensor of 16-bit floats. Strides are in elements; those of D are 1.
struct Operand {
  void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;

  template <class T>
  __device__ T* at(int b, int h) const {
    return static_cast<T*>(data) + b * batch + h * head;
  }
};

/// (batch, head, query, key). Boolean: true if visible. Floating: multiplied by `factor` and added to the unscaled
/// scores. Strides are in elements and may be 0.
struct Mask {
  const void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;
  std::int64_t column = 0;
  DType dtype = boolean;
  float factor = 1;
};

constexpr int kStatsRows = 64;

/// A forward or a backward. Query t sees the keys s < S with s <= t + offset; without a causal mask, offset is S.
struct Work {
  Operand q, k, v, out;
  Operand dout, dq, dk, dv;
  Mask mask;               // for the masked kernels
  float* lse = nullptr;    // (B, H, T), natural logarithms
  float* stats = nullptr;  // (B, H, padded T / kStatsRows, 2, kStatsRows): see stats_kernel
  int batches = 0;
  int heads = 0;  // H
  int group = 1;  // query heads per key head
  int queries = 0;
  int keys = 0;
  int depth = 0;   // D
  int offset = 0;  // in [-T, S]
  float scale = 1;
  float scale_log2 = 1;  // scale · log2 e
  DType dtype = float16;

  // Dropout: the choice of weights, and the scales of kept ones; 1 without dropout.
  bool drops = false;
  PhiloxKey dropout_key{};
  std::uint32_t dropped_below[8] = {};  // all bits are set if that bit of the threshold is not
  float kept_share = 1;
  float weight_factor = 1;   // 1 / kept_share
  float gradient_scale = 1;  // scale / kept_share

  /// Query rows, rounded up to the largest block of any kernel.
  __host__ __device__ int padded_queries() const { return (queries + 127) / 128 * 128; }
  /// The statistics of query `row` of head `head`; the second one is kStatsRows after the first.
  __device__ float* stats_of(int head, int row) const {
    return stats + (std::int64_t{head} * padded_queries() + row / kStatsRows * kStatsRows) * 2 + row % kStatsRows;
  }
  /// Number of keys visible to queries before `end`.
  __host__ __device__ int visible_keys(int end) const {
    const int last = (end < queries ? end : queries) + offset;
    return last < 0 ? 0 : last < keys ? last : keys;
  }
  /// The first query that sees a key from `begin` on.
  __host__ __device__ int first_query(int begin) const { return begin > offset ? begin - offset : 0; }
};

constexpr int kMaxDepth = 128;

/// The kernel that fills `stats` before a backward, and the kernels for all GPUs.
void fill_stats(const Work& work);
void forward_portable(const Work& work);
void backward_portable(const Work& work);
void forward_masked(const Work& work);
void backward_masked(const Work& work);

/// Whether the wgmma kernels support the tensors of a problem: addresses and strides must fit tensor
/// maps.
bool fits_sm90(const Work& work, bool backward);

void forward_sm90(const Work& work);
void backward_sm90(const Work& work);

}  // namespace mica::kernels::flash
