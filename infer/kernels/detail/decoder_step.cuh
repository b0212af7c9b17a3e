#pragma once

// Shared by the parts of the decoder step's kernel: its arguments, and the words through which blocks exchange results.
// See decoder_step_sm90.cu.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/infer/kernels/detail/kernels.h>

namespace mica::kernels::decoder {

using cuda::kWarp;

inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumers = kConsumerWarps * kWarp;
inline constexpr int kFinishers = 2 * kWarp;
inline constexpr int kCopiers = 2 * kWarp;
inline constexpr int kThreads = kConsumers + kFinishers + kCopiers;
// A launch gives each thread 168 registers. Finishers and copiers then release most of theirs to the consumers.
inline constexpr int kConsumerRegisters = 216;
inline constexpr int kOtherRegisters = 72;
static_assert(kConsumers * kConsumerRegisters + (kThreads - kConsumers) * kOtherRegisters <= kThreads * 168);
inline constexpr int kSegment = 1024;                     // the most terms of a stage
inline constexpr int kSlice = kSegment / kConsumerWarps;  // terms of a segment per warp
inline constexpr int kStageRows = 8;
inline constexpr int kBatchGroups = 8;  // groups of rows whose sums are added at once
inline constexpr int kBatchRows = kBatchGroups * kStageRows;
static_assert(kBatchRows == kFinishers);
inline constexpr int kAhead = 4;  // groups of rows that a warp holds in registers
// Stages that are in flight at once. The layers have few, since the words that blocks exchange queue behind them in the
// memory system; while the head's weights are copied, no words are exchanged.
inline constexpr int kStagesInFlight = 2;
inline constexpr int kHeadStagesInFlight = 6;
inline constexpr int kSegmentsAtOnce = 4;
inline constexpr int kOctet = 8;
inline constexpr int kChunk = 32;  // terms: an octet of each of four lanes
inline constexpr int kSliceChunks = kSlice / kChunk;
inline constexpr int kGroupTerms = 64;  // the fewest terms that share a scale
inline constexpr int kSliceGroups = kSlice / kGroupTerms;
inline constexpr int kQuad = 4;  // a lane's elements of a slice
static_assert(kQuad * kWarp == kSlice);

inline constexpr int kMostLayers = 64;
inline constexpr int kMostSplits = kMostAttentionParts;
inline constexpr int kSplitsAtOnce = 4;   // parts that are read at once
inline constexpr int kKeysOfSplit = 128;  // keys per split, as long as there are at most kSplitsAtOnce splits
inline constexpr int kMostKeysOfSplit = 256;
inline constexpr int kMostHeadWidth = 128;
inline constexpr int kKeysAtOnce = 4;   // keys per row group in a round
inline constexpr int kRoundsAhead = 2;  // rounds that are loaded in advance

/// What a step leaves to the next one. All members are 0 before the first step.
struct StepState {
  int ended;                   // the number of steps that have ended, mod 2
  int arrived;                 // warps that have reached the end of this step
  unsigned long long largest;  // the largest logit so far: see Candidate
};
static_assert(sizeof(StepState) <= kDecoderStepState * sizeof(std::int64_t));

/// A product's weight, or one of several side by side.
template <class T>
struct Weight {
  const void* data;  // T (outputs, depth), or words (depth / 8 or / 4, outputs)
  const T* scale;    // (groups, outputs), for a quantized weight
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
  const T* x;                 // (width); null: x is a row of the embedding
  const std::int64_t* token;  // selects the row; null if x is given
  const T* embedding;         // (vocab, width)
  std::int64_t vocab;
  T* logits;
  std::int64_t* next_token;      // or null
  std::int64_t* tokens_on_host;  // (2), or null
  std::int64_t* length;
  bool adds_to_length;
  int capacity;
  StepState* state;
  std::uint32_t* words;  // (2, layers, layer_words): for even and for odd steps
  int layer_words;
  int width;
  int hidden;
  int heads;
  int key_heads;
  int head_width;
  int stages;
  bool has_tails;   // the depth of some product is not a multiple of kSegment
  int x_terms;      // the greatest depth, rounded up to segments
  int group_shift;  // a group of a quantized weight has 64 · 2^group_shift terms
  float eps;
  float score_scale;  // includes the factor log2(e), since scores are exponents of 2
  bool rotates;
  float rotary_scale;
  float frequencies[kMostHeadWidth / 2];
};

/// Returns its argument, a kernel parameter. Keeps the compiler from reading it again at each use, since constant
/// memory is slow.
__device__ inline int in_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// Writes a word: two elements, or one float, with all bits inverted. A word of 0 has not been written yet: arithmetic
/// does not return the NaN whose bits are all 1, so no result is inverted to 0.
__device__ inline void publish(std::uint32_t* to, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(~value) : "memory");
}
__device__ inline void publish(std::uint32_t* to, float first, float second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(~__float_as_uint(first)),
               "r"(~__float_as_uint(second))
               : "memory");
}

/// The offset of a word in a list. 32 bytes of words are followed by 96 unused bytes, so that the words that all blocks
/// poll are spread over the slices of the L2 cache, among which lines of 128 bytes are distributed.
__device__ inline int word_offset(int word) {
  constexpr int kTogether = 8;
  return word / kTogether * (kTogether * static_cast<int>(kWordSpread)) + word % kTogether;
}

template <int kWords>
struct WordsOf {
  std::uint32_t at[kWords];

  __device__ bool is_complete() const {
    std::uint32_t least = at[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      least = min(least, at[i]);
    }
    return least != 0;
  }
  __device__ void read(const std::uint32_t* from) {
    static_assert(kWords == 2 || kWords == 4);
    if constexpr (kWords == 2) {
      asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(at[0]), "=r"(at[1]) : "l"(from) : "memory");
    } else {
      asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(at[0]), "=r"(at[1]), "=r"(at[2]), "=r"(at[3])
                   : "l"(from)
                   : "memory");
    }
  }
};

/// Reads the adjacent words at from(i) once, for each i for which has[i]. All bits of the other words become 1,
/// so that they count as complete.
template <int kCount, int kWords, class F>
__device__ void request(const F& from, const bool (&has)[kCount], WordsOf<kWords> (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      words[i].at[j] = ~0u;
    }
    if (has[i]) {
      words[i].read(from(i));
    }
  }
}

/// Polls until all words are complete, then inverts them: the result is what was published, or 0 for absent words. The
/// lanes of a warp also wait for each other's words.
template <int kCount, int kWords, class F>
__device__ void await_requested(const F& from, WordsOf<kWords> (&words)[kCount]) {
  while (true) {
    bool complete = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      complete = complete && words[i].is_complete();
    }
    if (__all_sync(cuda::kAllLanes, complete)) {
      break;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!words[i].is_complete()) {
        words[i].read(from(i));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      words[i].at[j] = ~words[i].at[j];
    }
  }
}

template <int kCount, int kWords, class F>
__device__ void await(const F& from, const bool (&has)[kCount], WordsOf<kWords> (&words)[kCount]) {
  request(from, has, words);
  await_requested(from, words);
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

/// A layer's words, through which its phases exchange results.
struct Words {
  std::uint32_t* parts;  // parts of attention, floats: (heads, splits, head_width)
  std::uint32_t* stats;  // of these parts, floats: (heads, splits, 2), the largest score and the sum of weights
  std::uint32_t* qkv;
  std::uint32_t* attention;
  std::uint32_t* sum;  // after o_proj
  std::uint32_t* hidden;
  std::uint32_t* out;

  template <class T>
  __device__ Words(const Arguments<T>& a, std::uint32_t* of_step, int layer) {
    const int queries = a.heads * a.head_width;
    parts = of_step + layer * a.layer_words;
    stats = parts + queries * kMostSplits;
    qkv = stats + a.heads * kMostSplits * 2;
    attention = qkv + (queries + 2 * a.key_heads * a.head_width) / 2 * kWordSpread;
    sum = attention + queries / 2 * kWordSpread;
    hidden = sum + a.width / 2 * kWordSpread;
    out = hidden + a.hidden / 2 * kWordSpread;
  }

  /// The previous layer's `out`.
  __device__ const std::uint32_t* previous_out(int layer_words) const { return out - layer_words; }
};

/// Makes this thread arrive at the barrier when the copies that it has started by copy_async() are complete.
__device__ inline void arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(cuda::shared_address(barrier)) : "memory");
}

}  // namespace mica::kernels::decoder
