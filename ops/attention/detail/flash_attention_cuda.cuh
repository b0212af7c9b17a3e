#pragma once

// Declarations shared by the flash attention kernels for all GPUs and those for compute capability 9.0.

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

/// A mask (batch, head, query, key). Boolean: true where the query sees the key. Floating: multiplied by `factor`, then
/// added to the unscaled scores. Strides are in elements and may be 0.
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

/// The arguments of a forward or a backward. Query t sees keys s < S with s <= t + offset; without causal masking,
/// offset is S.
struct Work {
  Operand q, k, v, out;
  Operand dout, dq, dk, dv;
  Mask mask;               // for the masked kernels
  float* lse = nullptr;    // (B, H, T), natural logarithms
  float* stats = nullptr;  // (B, H, padded T / kStatsRows, 2, kStatsRows), from stats_kernel
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

  // Dropout: which weights are dropped, and the scales of those that are kept (1 without dropout).
  bool drops = false;
  PhiloxKey dropout_key{};
  std::uint32_t dropped_below[8] = {};  // number i is all ones if bit i of the threshold is 0, else 0
  float kept_share = 1;
  float weight_factor = 1;   // 1 / kept_share
  float gradient_scale = 1;  // scale / kept_share

  /// The number of queries, rounded up to a multiple of every kernel's block.
  __host__ __device__ int padded_queries() const { return (queries + 127) / 128 * 128; }
  /// The first statistic of query `row` of head `head`; the second one is kStatsRows elements after it.
  __device__ float* stats_of(int head, int row) const {
    return stats + (std::int64_t{head} * padded_queries() + row / kStatsRows * kStatsRows) * 2 + row % kStatsRows;
  }
  /// The number of keys that queries before `end` see.
  __host__ __device__ int visible_keys(int end) const {
    const int last = (end < queries ? end : queries) + offset;
    return last < 0 ? 0 : last < keys ? last : keys;
  }
  /// The first query that sees a key from `begin` on.
  __host__ __device__ int first_query(int begin) const { return begin > offset ? begin - offset : 0; }
};

constexpr int kMaxDepth = 128;

/// Launch the kernel that computes `stats` before a backward, and the kernels for all GPUs.
void fill_stats(const Work& work);
void forward_portable(const Work& work);
void backward_portable(const Work& work);
void forward_masked(const Work& work);
void backward_masked(const Work& work);

/// Whether the wgmma kernels support the tensors: tensor maps (TMA) restrict addresses and strides.
bool fits_sm90(const Work& work, bool backward);

void forward_sm90(const Work& work);
void backward_sm90(const Work& work);

}  // namespace mica::kernels::flash
