#pragma once

// What the parts of the decoder step's kernel share: its arguments, and the words by which blocks hand over results.
// See decoder_step_cuda.cu.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode/detail/decode_kernels.h>

namespace mica::kernels::decoder {

using cuda::kWarp;

inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumers = kConsumerWarps * kWarp;
inline constexpr int kFinishers = 2 * kWarp;
inline constexpr int kCopiers = 2 * kWarp;
inline constexpr int kThreads = kConsumers + kFinishers + kCopiers;
inline constexpr int kSegment = 1024;                     // the most terms of a stage
inline constexpr int kSlice = kSegment / kConsumerWarps;  // of a warp
inline constexpr int kStageRows = 8;
inline constexpr int kBatchGroups = 8;  // stages' rows whose sums are added at once
inline constexpr int kBatchRows = kBatchGroups * kStageRows;
static_assert(kBatchRows == kFinishers);
inline constexpr int kAhead = 4;  // stages in registers
inline constexpr int kSegmentsAtOnce = 4;
inline constexpr int kOctet = 8;
inline constexpr int kChunk = 32;  // terms: an octet of each of four lanes
inline constexpr int kSliceChunks = kSlice / kChunk;
inline constexpr int kGroupTerms = 64;  // the least that share a scale
inline constexpr int kSliceGroups = kSlice / kGroupTerms;
inline constexpr int kPairs = kSlice / (2 * kWarp);  // a lane's pairs of elements of a slice: one of each group
static_assert(kPairs == kSliceGroups);

inline constexpr int kMostLayers = 64;
inline constexpr int kMostSplits = kMostAttentionParts;
inline constexpr int kKeysOfSplit = 256;
inline constexpr int kMostHeadWidth = 128;
inline constexpr int kKeysAtOnce = 2;  // of a team

/// A product's weight, or one of several side by side.
template <class T>
struct Weight {
  const void* data;  // T (outputs, depth), or words (depth / 8 or / 4, outputs)
  const T* scale;    // (groups, outputs), of a quantized weight
  const T* zero;
  const T* bias;  // or null
  int outputs;
};

template <class T>
struct alignas(16) Layer {
  Weight<T> qkv[3];
  Weight<T> o;
  Weight<T> gate_up[2];
  Weight<T> down;
  const T* input_norm;
  const T* post_norm;
  const T* q_norm;  // or null
  const T* k_norm;
  T* keys;  // (key_heads, capacity, head_width)
  T* values;
};

template <class T>
struct Arguments {
  Layer<T> layers[kMostLayers];
  int layer_count;
  Weight<T> head;
  const T* norm;
  const T* x;  // (width)
  T* logits;
  const std::int64_t* length;
  int capacity;
  int* state;            // the last step's number; how many blocks have ended
  std::uint64_t* words;  // of all layers
  int layer_words;
  int width;
  int hidden;
  int heads;
  int key_heads;
  int head_width;
  int stages;
  int x_terms;      // the greatest depth, rounded up to segments
  int group_shift;  // a group of a quantized weight has 64 · 2^group_shift terms
  float eps;
  float score_scale;  // times log2(e): scores are exponents of 2
  bool rotates;
  float rotary_scale;
  float frequencies[kMostHeadWidth / 2];
};

/// Keeps the compiler from reading a parameter again at each use: constant memory is slow.
__device__ inline int in_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ inline void publish(std::uint64_t* to, std::uint32_t value, std::uint32_t tag) {
  const std::uint64_t word = static_cast<std::uint64_t>(tag) << 32 | value;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ inline std::uint64_t read_word(const std::uint64_t* from) {
  std::uint64_t word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

/// The values of some words, from(i), once they have the tag; 0 for absent ones.
template <int kCount, class F>
__device__ void await(const F& from, const bool (&has)[kCount], std::uint32_t tag, std::uint32_t (&values)[kCount]) {
  std::uint64_t words[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    words[i] = has[i] ? 0 : static_cast<std::uint64_t>(tag) << 32;  // no step has the number 0
  }
  bool complete;
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (static_cast<std::uint32_t>(words[i] >> 32) != tag) {
        words[i] = read_word(from(i));
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      complete = complete && static_cast<std::uint32_t>(words[i] >> 32) == tag;
    }
  } while (!complete);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = static_cast<std::uint32_t>(words[i]);
  }
}

/// The same for neighbors.
template <int kCount>
__device__ void await(const std::uint64_t* from, std::uint32_t tag, std::uint32_t (&values)[kCount]) {
  bool has[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    has[i] = true;
  }
  await([from](int i) { return from + i; }, has, tag, values);
}

template <class T>
__device__ float2 unpack_pair(std::uint32_t pair) {
  float values[2];
  cuda::unpack(reinterpret_cast<const cuda::Pack<T, 2>&>(pair), values);
  return {values[0], values[1]};
}

template <class T>
__device__ std::uint32_t pack_pair(float first, float second) {
  const float values[2] = {first, second};
  const cuda::Pack<T, 2> pack = cuda::pack_of<T>(values);
  return reinterpret_cast<const std::uint32_t&>(pack);
}

/// A layer's words: what its phases hand over.
struct Words {
  std::uint64_t* qkv;
  std::uint64_t* attention;
  std::uint64_t* sum;  // after o_proj
  std::uint64_t* hidden;
  std::uint64_t* out;
  std::uint64_t* parts;  // of attention's splits, floats: (heads, splits, head_width + 2)

  template <class T>
  __device__ Words(const Arguments<T>& a, int layer) {
    const int queries = a.heads * a.head_width;
    qkv = a.words + layer * a.layer_words;
    attention = qkv + (queries + 2 * a.key_heads * a.head_width) / 2;
    sum = attention + queries / 2;
    hidden = sum + a.width / 2;
    out = hidden + a.hidden / 2;
    parts = out + a.width / 2;
  }

  /// Of the layer before.
  __device__ const std::uint64_t* previous_out(int layer_words) const { return out - layer_words; }
};

/// Arrives when the copies that this thread has started by copy_async are done.
__device__ inline void arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(cuda::shared_address(barrier)) : "memory");
}

}  // namespace mica::kernels::decoder
