#pragma once

// The flash attention kernels for all GPUs with bfloat16 tensor cores (compute capability 8.0 and up), after
// FlashAttention-2 (Dao, 2023). See flash_attention.md. Each warp owns 16 queries and iterates over blocks of keys; for
// the gradients of keys and values it is the other way around. q · kᵀ gives a warp's weights in the register layout
// that the next product needs, so they are never stored to memory.
//
//     owned: q (64 rows) ───────────┐
//                                   ├──> scores ──> mask ──> softmax ──> dropout ──> out = out · shrink + weights · v
//     passing: k, v (two stages) ───┘    (mma)             (registers)                     (mma)
//
// The gradients own q and dout, or k and v, and the others pass. There are variants for head sizes up to 32, 64, 96 and
// 128, and for what happens to the weights (Variant).

#include <cmath>
#include <cstdint>

#include <mica/core/cuda/detail/mma.cuh>
#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/dispatch.h>
#include <mica/ops/attention/detail/flash_attention_cuda.cuh>
#include <mica/ops/attention/detail/flash_attention_dropout.cuh>

namespace mica::kernels::flash {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpRows = 16;                   // rows of a tensor core instruction
constexpr int kBlockRows = kWarps * kWarpRows;  // rows that a thread block owns
constexpr int kPack = 8;                        // 16-bit elements in 16 bytes
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// What happens to the weights: nothing, dropout, or a mask tensor with or without dropout.
enum class Variant { plain, drops, masked };

/// Tiles in shared memory hold rows of kDepth elements, which are zero past D. Each row is padded by 16 bytes, so that
/// the same column of 8 consecutive rows is in different banks.
template <int kDepth>
struct TileSizes {
  static constexpr int kPitch = kDepth + kPack;
  static constexpr int kSteps = kDepth <= 64 ? 64 : 32;  // rows of a block that is iterated over
  static_assert(kStatsRows % kSteps == 0);
  static constexpr int kOwned = kBlockRows * kPitch;  // elements of an owned tile
  static constexpr int kPassing = kSteps * kPitch;    // elements of a tile that is iterated over
  static constexpr int kForwardBytes = (kOwned + 4 * kPassing) * 2;
  static constexpr int kBackwardBytes = (2 * kOwned + 4 * kPassing) * 2;
};

/// The minimum number of blocks per multiprocessor (__launch_bounds__); 0 leaves it to the compiler, which with
/// dropout, and for the key gradients with masks, would spill registers.
template <int kDepth, Variant kVariant>
constexpr int kBlocks = kVariant == Variant::drops && (kDepth < 128) ? 3 : 0;

/// Starts copying kRows rows to shared memory (cp.async); rows past the end become zeros.
template <class T, int kDepth, int kRows>
__device__ void load_rows(T* to, const T* from, std::int64_t stride, int rows, int depth) {
  constexpr int kPacks = kDepth / kPack;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPacks; i += kThreads) {
    const int row = i / kPacks;
    const int element = i % kPacks * kPack;
    const bool present = row < rows && element < depth;
    cuda::copy_async<16>(to + row * TileSizes<kDepth>::kPitch + element, present ? from + row * stride + element : from,
                         present);
  }
}

/// Loads 16 rows and 16 columns at `tile`, as the left operand of mma (ldmatrix).
template <int kPitch, class T>
__device__ void load_first(std::uint32_t (&a)[4], const T* tile, int column) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  cuda::load_matrices(a, tile + lane % 16 * kPitch + column + lane / 16 * kPack);
}

/// sums (16, kRows) = a (16, kDepth) · b (kRows, kDepth)ᵀ, both in shared memory.
template <class T, int kDepth, int kRows>
__device__ void multiply_transposed(float (&sums)[kRows / 8][4], const T* a, const T* b) {
  constexpr int kPitch = TileSizes<kDepth>::kPitch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* const b_row = b + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * kPack;
#pragma unroll
  for (auto& tile : sums) {
#pragma unroll
    for (float& sum : tile) {
      sum = 0;
    }
  }
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    std::uint32_t first[4];
    load_first<kPitch>(first, a, k);
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
      std::uint32_t second[4];
      cuda::load_matrices(second, b_row + j * 8 * kPitch + k);
      cuda::multiply_add_16_8_16<T>(sums[j], first, second[0], second[1]);
      cuda::multiply_add_16_8_16<T>(sums[j + 1], first, second[2], second[3]);
    }
  }
}

struct KeepAll {
  __device__ std::uint32_t operator()(std::uint32_t pair, int) const { return pair; }
};

/// Applies dropout to a pair of weights, by the bits of draw_kept().
template <bool kRowsAreQueries>
struct KeepSome {
  std::uint32_t kept;
  __device__ std::uint32_t operator()(std::uint32_t pair, int i) const {
    return keep_pair<kRowsAreQueries>(pair, kept, i);
  }
};

/// sums (16, kDepth) += weights (16, kRows), rounded to T, · b (kRows, kDepth) in shared memory. keep(pair, i) applies
/// dropout to this lane's weights i and i + 1, rounded.
template <class T, int kDepth, int kRows, class Keep = KeepAll>
__device__ void add_product(float (&sums)[kDepth / 8][4], const float (&weights)[kRows / 8][4], const T* b,
                            Keep keep = {}) {
  constexpr int kPitch = TileSizes<kDepth>::kPitch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* const b_row = b + lane % 16 * kPitch + lane / 16 * kPack;
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    std::uint32_t first[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const two = &weights[2 * k + i / 2][i % 2 * 2];
      first[i] = keep(cuda::pair_of<T>(two[0], two[1]), k * 8 + i * 2);
    }
#pragma unroll
    for (int j = 0; j < kDepth / 8; j += 2) {
      std::uint32_t second[4];
      cuda::load_matrices_transposed(second, b_row + k * 16 * kPitch + j * 8);
      cuda::multiply_add_16_8_16<T>(sums[j], first, second[0], second[1]);
      cuda::multiply_add_16_8_16<T>(sums[j + 1], first, second[2], second[3]);
    }
  }
}

/// Writes a warp's 16 rows of a matrix with `rows` rows, from row `row` on. Rows l / 4 and l / 4 + 8 are multiplied by
/// the two factors of lane l.
template <class T, int kDepth>
__device__ void store_rows(T* to, std::int64_t stride, int row, int rows, int depth, const float (&sums)[kDepth / 8][4],
                           float first_factor, float second_factor) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + lane / 4 + half * 8;
    const float factor = half == 0 ? first_factor : second_factor;
    if (own < rows) {
      T* const line = to + own * stride + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDepth / 8; ++j) {
        if (j * 8 < depth) {
          *reinterpret_cast<std::uint32_t*>(line + j * 8) =
              cuda::pair_of<T>(sums[j][2 * half] * factor, sums[j][2 * half + 1] * factor);
        }
      }
    }
  }
}

/// The maximum over the four lanes that share a row.
inline __device__ float maximum_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline __device__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/// Which weights dropout keeps, for a variant. The masked variant has no register for the random key, and reads it each
/// time.
template <Variant kVariant, bool kRowsAreQueries, int kColumns>
__device__ std::uint32_t draw_for(const Work& a, const PhiloxKey& key, int head, int row, int column) {
  if constexpr (kVariant == Variant::masked) {
    return a.drops ? draw_kept<kRowsAreQueries, kColumns>(a, absolute_key(a.dropout_key), head, row, column) : ~0u;
  } else {
    return draw_kept<kRowsAreQueries, kColumns>(a, key, head, row, column);
  }
}

/// Applies the mask tensor to a warp's unscaled scores of query head h: a tile of 16 rows and kColumns columns that
/// begins at `row` and `column`.
template <class T, bool kRowsAreQueries, int kColumns>
__device__ void add_mask(float (&scores)[kColumns / 8][4], const Work& a, int b, int h, int row, int column) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t head = b * a.mask.batch + h * a.mask.head;
  const auto for_each = [&](const auto& change) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int own = row + lane / 4 + half * 8;
          const int other = column + j * 8 + lane % 4 * 2 + i;
          const int query = kRowsAreQueries ? own : other;
          const int key = kRowsAreQueries ? other : own;
          if (query < a.queries && key < a.keys) {
            float& score = scores[j][2 * half + i];
            score = change(score, head + query * a.mask.row + key * a.mask.column);
          }
        }
      }
    }
  };
  const void* const data = a.mask.data;
  switch (a.mask.dtype) {
    case DType::boolean:
      return for_each(
          [data](float score, std::int64_t at) { return static_cast<const bool*>(data)[at] ? score : -INFINITY; });
    case DType::float32:
      return for_each([data, &a](float score, std::int64_t at) {
        return score + static_cast<const float*>(data)[at] * a.mask.factor;
      });
    default:
      return for_each([data, &a](float score, std::int64_t at) {
        return score + static_cast<float>(static_cast<const T*>(data)[at]) * a.mask.factor;
      });
  }
}

/// Which queries a thread processes. The first thread blocks get the last queries, which with causal masking see the
/// most keys and take longest; within a block of queries, thread blocks are ordered by head.
struct QueryBlock {
  int first;  // the block's first query
  int head;   // counted over all batches
  int b;
  int h;
  int warp_row;  // the warp's first row in the block
  int lane;

  __device__ static QueryBlock here(const Work& a) {
    const int all_heads = a.batches * a.heads;
    const int blocks = static_cast<int>(gridDim.x) / all_heads;
    const int block = static_cast<int>(blockIdx.x) / all_heads;
    const int head = static_cast<int>(blockIdx.x) % all_heads;
    const int thread = static_cast<int>(threadIdx.x);
    return {.first = (blocks - 1 - block) * kBlockRows,
            .head = head,
            .b = head / a.heads,
            .h = static_cast<int>(blockIdx.x) % a.heads,
            .warp_row = thread / kWarp * kWarpRows,
            .lane = thread % kWarp};
  }
};

/// The keys and values that a block of queries sees. They stream through two stages of shared memory, block by block;
/// each block is a step.
template <class T, int kDepth>
class VisibleKeys {
  using P = TileSizes<kDepth>;

 public:
  const int steps;

  __device__ VisibleKeys(const Work& a, const QueryBlock& block, T* stages)
      : steps((a.visible_keys(block.first + kBlockRows) + P::kSteps - 1) / P::kSteps),
        a_(a),
        k_(a.k.at<const T>(block.b, block.h / a.group)),
        v_(a.v.at<const T>(block.b, block.h / a.group)),
        stages_(stages) {}

  /// Starts copying the keys and values of a step.
  __device__ void load(int step) const {
    T* const to = stages_ + step % 2 * 2 * P::kPassing;
    const int key = step * P::kSteps;
    load_rows<T, kDepth, P::kSteps>(to, k_ + key * a_.k.row, a_.k.row, a_.keys - key, a_.depth);
    load_rows<T, kDepth, P::kSteps>(to + P::kPassing, v_ + key * a_.v.row, a_.v.row, a_.keys - key, a_.depth);
  }

  /// The keys of a step; its values are kPassing elements after them.
  __device__ const T* at(int step) const { return stages_ + step % 2 * 2 * P::kPassing; }

 private:
  const Work& a_;
  const T* k_;
  const T* v_;
  T* stages_;
};

/// Before a step: starts the copies of the next one and waits for this step's. `passing` is VisibleKeys or
/// SeeingQueries.
template <class Passing>
__device__ void arrive_at(const Passing& passing, int step) {
  if (step + 1 < passing.steps) {
    passing.load(step + 1);
  }
  cuda::commit_copies();
  cuda::wait_copies<1>();
  __syncthreads();
}

/// The softmax of lane l's rows l / 4 and l / 4 + 8 so far.
struct SoftmaxState {
  float most[2] = {-INFINITY, -INFINITY};  // the largest unscaled scores
  float total[2] = {};                     // this lane's part of the sums of weights
};

/// Sets the scores of keys that a query does not see to −inf, in a warp's tile that begins at `query` and `key`.
template <int kKeys>
__device__ void mask_unseen(float (&scores)[kKeys / 8][4], const Work& a, int query, int key) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (key + kKeys > a.keys || key + kKeys - 1 > query + a.offset) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = min(a.keys, query + lane / 4 + half * 8 + a.offset + 1) - key - lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (j * 8 + i >= end) {
            scores[j][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }
}

/// Converts scores to unnormalized weights. Since the maximum may have grown, earlier sums are rescaled.
template <int kKeys, int kDepth>
__device__ void soften(float (&scores)[kKeys / 8][4], SoftmaxState& state, float (&sums)[kDepth / 8][4],
                       float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = state.most[half];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      most = fmaxf(most, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
    }
    most = maximum_of_row(most);
    const float shift = most == -INFINITY ? 0 : most * scale_log2;
    const float shrink = cuda::approximate_exp2(state.most[half] * scale_log2 - shift);
    state.most[half] = most;
    state.total[half] *= shrink;
#pragma unroll
    for (int j = 0; j < kDepth / 8; ++j) {
      sums[j][2 * half] *= shrink;
      sums[j][2 * half + 1] *= shrink;
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& weight = scores[j][2 * half + i];
        weight = cuda::approximate_exp2(weight * scale_log2 - shift);
        state.total[half] += weight;
      }
    }
  }
}

/// The forward of a block of queries (QueryBlock).
template <class T, int kDepth, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocks<kDepth, kVariant>) forward_kernel(const __grid_constant__ Work a) {
  using P = TileSizes<kDepth>;
  constexpr bool kDrops = kVariant != Variant::plain;
  constexpr int kKeys = P::kSteps;
  extern __shared__ __align__(16) unsigned char memory[];
  T* const q = reinterpret_cast<T*>(memory);
  T* const kv = q + P::kOwned;  // two stages of k and v

  const QueryBlock block = QueryBlock::here(a);
  const auto [first, head, b, h, warp_row, lane] = block;
  const VisibleKeys<T, kDepth> passing(a, block, kv);

  [[maybe_unused]] const PhiloxKey dropout_key = kVariant == Variant::drops ? absolute_key(a.dropout_key) : PhiloxKey{};
  float sums[kDepth / 8][4] = {};
  SoftmaxState state;
  if (passing.steps > 0) {
    load_rows<T, kDepth, kBlockRows>(q, a.q.at<const T>(b, h) + first * a.q.row, a.q.row, a.queries - first, a.depth);
    passing.load(0);
    cuda::commit_copies();
  }
  for (int step = 0; step < passing.steps; ++step) {
    arrive_at(passing, step);
    const T* const k = passing.at(step);
    const int key = step * kKeys;
    float weights[kKeys / 8][4];
    multiply_transposed<T, kDepth, kKeys>(weights, q + warp_row * P::kPitch, k);
    if constexpr (kVariant == Variant::masked) {
      add_mask<T, true, kKeys>(weights, a, b, h, first + warp_row, key);
    }
    mask_unseen<kKeys>(weights, a, first + warp_row, key);
    soften<kKeys, kDepth>(weights, state, sums, a.scale_log2);
    if constexpr (kDrops) {
      const std::uint32_t kept =
          draw_for<kVariant, true, kKeys>(a, dropout_key, b * a.heads + h, first + warp_row, key);
      add_product<T, kDepth, kKeys>(sums, weights, k + P::kPassing, KeepSome<true>{kept});
    } else {
      add_product<T, kDepth, kKeys>(sums, weights, k + P::kPassing);
    }
    __syncthreads();  // before the stage is filled again
  }
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_row(state.total[half]);
    factors[half] = total == 0 ? 0 : a.weight_factor / total;  // 0 if the query sees no key
    const int row = first + warp_row + lane / 4 + half * 8;
    if (a.lse != nullptr && lane % 4 == 0 && row < a.queries) {
      a.lse[(std::int64_t{b} * a.heads + h) * a.queries + row] =
          total == 0 ? -INFINITY : (state.most[half] * a.scale_log2 + log2f(total)) * kLn2;
    }
  }
  store_rows<T, kDepth>(a.out.at<T>(b, h), a.out.row, first + warp_row, a.queries, a.depth, sums, factors[0],
                        factors[1]);
}

/// The gradient of a block of queries (QueryBlock).
template <class T, int kDepth, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocks<kDepth, kVariant>)
    query_gradient_kernel(const __grid_constant__ Work a) {
  using P = TileSizes<kDepth>;
  constexpr bool kDrops = kVariant != Variant::plain;
  constexpr int kKeys = P::kSteps;
  extern __shared__ __align__(16) unsigned char memory[];
  T* const q = reinterpret_cast<T*>(memory);
  T* const dout = q + P::kOwned;
  T* const kv = dout + P::kOwned;  // two stages of k and v

  const QueryBlock block = QueryBlock::here(a);
  const auto [first, head, b, h, warp_row, lane] = block;
  const VisibleKeys<T, kDepth> passing(a, block, kv);

  [[maybe_unused]] const PhiloxKey dropout_key = kVariant == Variant::drops ? absolute_key(a.dropout_key) : PhiloxKey{};
  float sums[kDepth / 8][4] = {};
  float log2_sums[2];
  float means[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const stats = a.stats_of(head, first + warp_row + lane / 4 + half * 8);
    log2_sums[half] = stats[0];
    means[half] = stats[kStatsRows];
  }
  if (passing.steps > 0) {
    load_rows<T, kDepth, kBlockRows>(q, a.q.at<const T>(b, h) + first * a.q.row, a.q.row, a.queries - first, a.depth);
    load_rows<T, kDepth, kBlockRows>(dout, a.dout.at<const T>(b, h) + first * a.dout.row, a.dout.row, a.queries - first,
                                     a.depth);
    passing.load(0);
    cuda::commit_copies();
  }
  for (int step = 0; step < passing.steps; ++step) {
    arrive_at(passing, step);
    const T* const k = passing.at(step);
    float weights[kKeys / 8][4];
    float dweights[kKeys / 8][4];
    multiply_transposed<T, kDepth, kKeys>(weights, q + warp_row * P::kPitch, k);
    multiply_transposed<T, kDepth, kKeys>(dweights, dout + warp_row * P::kPitch, k + P::kPassing);
    const int key = step * kKeys;
    if constexpr (kVariant == Variant::masked) {
      add_mask<T, true, kKeys>(weights, a, b, h, first + warp_row, key);
    }
    [[maybe_unused]] std::uint32_t kept = 0;
    if constexpr (kDrops) {
      kept = draw_for<kVariant, true, kKeys>(a, dropout_key, head, first + warp_row, key);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = min(a.keys, first + warp_row + lane / 4 + half * 8 + a.offset + 1) - key - lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kDrops) {
            float& dweight = dweights[j][2 * half + i];
            dweight = keep<true>(dweight, kept, j * 4 + 2 * half + i);
          }
          float& weight = weights[j][2 * half + i];
          weight = j * 8 + i < end ? cuda::approximate_exp2(weight * a.scale_log2 - log2_sums[half]) : 0;
          weight *= dweights[j][2 * half + i] - means[half];
        }
      }
    }
    add_product<T, kDepth, kKeys>(sums, weights, k);
    __syncthreads();  // before the stage is filled again
  }
  store_rows<T, kDepth>(a.dq.at<T>(b, h), a.dq.row, first + warp_row, a.queries, a.depth, sums, a.gradient_scale,
                        a.gradient_scale);
}

/// The queries that see a block of keys, of all heads that share the key head. They and dout stream through two stages
/// of shared memory, block by block; each block is a step.
template <class T, int kDepth>
class SeeingQueries {
  using P = TileSizes<kDepth>;

 public:
  const int first_step;
  const int steps_of_head;
  const int steps;

  __device__ SeeingQueries(const Work& a, int first_key, int b, int key_head, T* stages)
      : first_step(min(a.first_query(first_key), a.queries) / P::kSteps),
        steps_of_head((a.queries + P::kSteps - 1) / P::kSteps - first_step),
        steps(steps_of_head * a.group),
        a_(a),
        b_(b),
        key_head_(key_head),
        stages_(stages) {}

  __device__ int head_of(int step) const { return key_head_ * a_.group + step / steps_of_head; }
  __device__ int query_of(int step) const { return (first_step + step % steps_of_head) * P::kSteps; }

  /// Starts copying the queries of a step and their dout.
  __device__ void load(int step) const {
    T* const to = stages_ + step % 2 * 2 * P::kPassing;
    const int h = head_of(step);
    const int query = query_of(step);
    load_rows<T, kDepth, P::kSteps>(to, a_.q.at<const T>(b_, h) + query * a_.q.row, a_.q.row, a_.queries - query,
                                    a_.depth);
    load_rows<T, kDepth, P::kSteps>(to + P::kPassing, a_.dout.at<const T>(b_, h) + query * a_.dout.row, a_.dout.row,
                                    a_.queries - query, a_.depth);
  }

  /// The queries of a step; their dout is kPassing elements after them.
  __device__ const T* at(int step) const { return stages_ + step % 2 * 2 * P::kPassing; }

 private:
  const Work& a_;
  int b_;
  int key_head_;
  T* stages_;
};

/// Converts transposed scores to weights, 0 where a query does not see a key. `stats` are those of the lane's first
/// query; `begin` is the first query that sees the lane's first key, counted from there.
template <int kQueries>
__device__ void weigh(float (&scores)[kQueries / 8][4], const float* stats, int begin, float scale_log2) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 log2_sums = *reinterpret_cast<const float2*>(stats + j * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& weight = scores[j][2 * half + i];
        weight = j * 8 + i >= begin + half * 8
                     ? cuda::approximate_exp2(weight * scale_log2 - (i == 0 ? log2_sums.x : log2_sums.y))
                     : 0;
      }
    }
  }
}

/// weights · (dweights − mean), the gradients of the transposed scores. kDrops: dropout, by the bits of draw_kept().
template <int kQueries, bool kDrops>
__device__ void differentiate(float (&weights)[kQueries / 8][4], float (&dweights)[kQueries / 8][4], const float* stats,
                              std::uint32_t kept) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 means = *reinterpret_cast<const float2*>(stats + kStatsRows + j * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kDrops) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          dweights[j][i] = keep<false>(dweights[j][i], kept, j * 4 + i);
        }
      }
      weights[j][2 * half] *= dweights[j][2 * half] - means.x;
      weights[j][2 * half + 1] *= dweights[j][2 * half + 1] - means.y;
    }
  }
}

/// The gradients of a block of keys and values, summed over the queries of all heads that share them. Weights are
/// transposed: rows are keys. The first thread blocks get the first keys, which with causal masking most queries see.
template <class T, int kDepth, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kVariant == Variant::masked ? 2 : 0)
    key_gradient_kernel(const __grid_constant__ Work a) {
  using P = TileSizes<kDepth>;
  constexpr bool kDrops = kVariant != Variant::plain;
  constexpr int kQueries = P::kSteps;
  extern __shared__ __align__(16) unsigned char memory[];
  T* const k = reinterpret_cast<T*>(memory);
  T* const v = k + P::kOwned;

  const int key_heads = a.heads / a.group;
  const int all_heads = a.batches * key_heads;
  const int first = static_cast<int>(blockIdx.x) / all_heads * kBlockRows;
  const int b = static_cast<int>(blockIdx.x) % all_heads / key_heads;
  const int key_head = static_cast<int>(blockIdx.x) % key_heads;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const SeeingQueries<T, kDepth> passing(a, first, b, key_head, v + P::kOwned);

  [[maybe_unused]] const PhiloxKey dropout_key = kVariant == Variant::drops ? absolute_key(a.dropout_key) : PhiloxKey{};
  float dk[kDepth / 8][4] = {};
  float dv[kDepth / 8][4] = {};
  if (passing.steps > 0) {
    load_rows<T, kDepth, kBlockRows>(k, a.k.at<const T>(b, key_head) + first * a.k.row, a.k.row, a.keys - first,
                                     a.depth);
    load_rows<T, kDepth, kBlockRows>(v, a.v.at<const T>(b, key_head) + first * a.v.row, a.v.row, a.keys - first,
                                     a.depth);
    passing.load(0);
    cuda::commit_copies();
  }
  for (int step = 0; step < passing.steps; ++step) {
    arrive_at(passing, step);
    const T* const q = passing.at(step);
    const T* const dout = q + P::kPassing;
    const int query = passing.query_of(step);
    const float* const stats = a.stats_of(b * a.heads + passing.head_of(step), query) + lane % 4 * 2;
    float weights[kQueries / 8][4];
    float dweights[kQueries / 8][4];
    multiply_transposed<T, kDepth, kQueries>(weights, k + warp_row * P::kPitch, q);
    if constexpr (kVariant == Variant::masked) {
      add_mask<T, false, kQueries>(weights, a, b, passing.head_of(step), first + warp_row, query);
    }
    // Keys past the end need no mask, since their rows are not written.
    weigh<kQueries>(weights, stats, first + warp_row + lane / 4 - a.offset - query - lane % 4 * 2, a.scale_log2);
    [[maybe_unused]] std::uint32_t kept = 0;
    if constexpr (kDrops) {
      kept = draw_for<kVariant, false, kQueries>(a, dropout_key, b * a.heads + passing.head_of(step), first + warp_row,
                                                 query);
      add_product<T, kDepth, kQueries>(dv, weights, dout, KeepSome<false>{kept});
    } else {
      add_product<T, kDepth, kQueries>(dv, weights, dout);
    }
    multiply_transposed<T, kDepth, kQueries>(dweights, v + warp_row * P::kPitch, dout);
    differentiate<kQueries, kDrops>(weights, dweights, stats, kept);
    add_product<T, kDepth, kQueries>(dk, weights, q);
    __syncthreads();  // before the stage is filled again
  }
  store_rows<T, kDepth>(a.dk.at<T>(b, key_head), a.dk.row, first + warp_row, a.keys, a.depth, dk, a.gradient_scale,
                        a.gradient_scale);
  store_rows<T, kDepth>(a.dv.at<T>(b, key_head), a.dv.row, first + warp_row, a.keys, a.depth, dv, a.weight_factor,
                        a.weight_factor);
}

// On the host.

inline void launch(void (*kernel)(Work), const char* name, std::int64_t blocks, int bytes, const Work& work) {
  check(blocks < std::int64_t{1} << 31, "attention: {} blocks exceed the limit of a grid", blocks);
  cuda::Launch(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), bytes).run(kernel, name, work);
}

inline std::int64_t blocks_of(int rows, int block) { return (std::int64_t{rows} + block - 1) / block; }

using DTypes = Types<Float16, BFloat16>;

/// Calls f.operator()<T, kDepth>() with the element type and the padded width of the heads.
template <class F>
void on_dtype_and_depth(const Work& work, const F& f) {
  on_dtype(DTypes{}, work.dtype, "attention", [&]<class T>() {
    if (work.depth <= 32) {
      f.template operator()<T, 32>();
    } else if (work.depth <= 64) {
      f.template operator()<T, 64>();
    } else if (work.depth <= 96) {
      f.template operator()<T, 96>();
    } else {
      f.template operator()<T, 128>();
    }
  });
}

template <Variant kVariant>
void launch_forward(const Work& work) {
  const char* const name = kVariant == Variant::masked ? "flash_masked_forward_kernel" : "flash_forward_kernel";
  on_dtype_and_depth(work, [&]<class T, int kDepth>() {
    launch(forward_kernel<T, kDepth, kVariant>, name, blocks_of(work.queries, kBlockRows) * work.batches * work.heads,
           TileSizes<kDepth>::kForwardBytes, work);
  });
}

template <Variant kVariant>
void launch_backward(const Work& work) {
  constexpr bool kMasked = kVariant == Variant::masked;
  on_dtype_and_depth(work, [&]<class T, int kDepth>() {
    constexpr int kBytes = TileSizes<kDepth>::kBackwardBytes;
    launch(query_gradient_kernel<T, kDepth, kVariant>,
           kMasked ? "flash_masked_query_gradient_kernel" : "flash_query_gradient_kernel",
           blocks_of(work.queries, kBlockRows) * work.batches * work.heads, kBytes, work);
    launch(key_gradient_kernel<T, kDepth, kVariant>,
           kMasked ? "flash_masked_key_gradient_kernel" : "flash_key_gradient_kernel",
           blocks_of(work.keys, kBlockRows) * work.batches * (work.heads / work.group), kBytes, work);
  });
}

}  // namespace mica::kernels::flash
