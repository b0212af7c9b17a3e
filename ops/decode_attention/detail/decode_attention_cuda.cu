// The attention of one new position per sequence. Normalizes and rotates queries and the key, appends key and value to
// the cache, and reads all cached keys and values once.
//
//     cluster of up to 8 blocks: one sequence, one key head and up to 4 of its query heads
//
//         keys      16 | 16 | 16 | 16 | ...     dealt out to the warps of block 0, block 1, ..., round-robin
//                        |
//         a warp has for each query head the largest score m, the sum l of 2^(score - m) and the weighted sum of
//         values: an online softmax. For 16-bit floats, tensor cores compute the products
//                        |
//         sums of a block's warps and of the new key -> sums of the cluster's blocks, each in a fixed order -> y
//
// There are variants for each head size, and for 1, 2 or up to 4 query heads per key head.
//
// If the previous kernel does not write to the cache, the copies of the first keys and values to shared memory start
// before that kernel has ended.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <mica/core/cuda/detail/mma.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode_attention/detail/decode_attention_kernels.h>
#include <mica/ops/decode_attention/detail/running_softmax.cuh>
#include <mica/ops/rotary/detail/rotation_cuda.cuh>

namespace mica::kernels {

namespace {

using cuda::kWarp;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kClusterBlocks = 8;
constexpr int kMostBlocks = 264;  // of a grid, at most, if clusters have several: 2 per multiprocessor (measured)
constexpr int kKeysOfOne = 128;   // up to this many keys, one block is faster than a cluster
constexpr int kMostWidth = 256;

template <class T>
struct Arguments {
  const T* q;
  const T* k;
  const T* v;
  std::int64_t q_stride;  // of rows
  std::int64_t k_stride;
  std::int64_t v_stride;
  const T* q_norm;  // or null
  const T* k_norm;
  T* keys;
  T* values;
  const std::int64_t* length;
  const std::int64_t* padding;  // or null
  T* y;
  int heads;
  int key_heads;
  int parts;   // parts that the query heads of a key head are split into
  int blocks;  // per cluster
  bool ready_early;
  std::int64_t capacity;
  float eps;
  float score_scale;  // includes the factor log2(e), since scores are exponents of 2
  bool rotates;
  double rotary_scale;
  float frequencies[kMostWidth / 2];
};

// The cosines and sines of the position's angles.
template <int kWidth>
struct Rotation {
  float cosines[kWidth / 2];
  float sines[kWidth / 2];

  template <class T>
  __device__ void fill(const Arguments<T>& a, std::int64_t position) {
    for (int j = static_cast<int>(threadIdx.x); j < kWidth / 2; j += kThreads) {
      const auto [cosine, sine] =
          cosine_and_sine<float>(static_cast<float>(position), a.frequencies[j], a.rotary_scale);
      sines[j] = sine;
      cosines[j] = cosine;
    }
  }
};

// A warp normalizes and rotates a head's row. Each step rounds to T, as the separate ops do. Passes the results to
// to(column, value).
template <class T, int kWidth, class F>
__device__ void prepare(const Arguments<T>& a, const Rotation<kWidth>& rotation, const T* row, const T* norm,
                        const F& to) {
  constexpr int kHalf = kWidth / 2;
  constexpr int kPairs = (kHalf + kWarp - 1) / kWarp;  // per lane
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float left[kPairs];
  float right[kPairs];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int j = lane + i * kWarp;
    const bool has = kHalf % kWarp == 0 || j < kHalf;
    left[i] = has ? static_cast<float>(row[j]) : 0;
    right[i] = has ? static_cast<float>(row[j + kHalf]) : 0;
    squares += left[i] * left[i] + right[i] * right[i];
  }
  if (norm != nullptr) {
    const float inverse = rsqrtf(cuda::sum_lanes<kWarp>(squares) / kWidth + a.eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int j = lane + i * kWarp;
      if (kHalf % kWarp == 0 || j < kHalf) {
        left[i] = static_cast<float>(static_cast<T>(left[i] * inverse * static_cast<float>(norm[j])));
        right[i] = static_cast<float>(static_cast<T>(right[i] * inverse * static_cast<float>(norm[j + kHalf])));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int j = lane + i * kWarp;
    if (kHalf % kWarp == 0 || j < kHalf) {
      if (a.rotates) {
        const float cosine = rotation.cosines[j];
        const float sine = rotation.sines[j];
        to(j, static_cast<T>(left[i] * cosine - right[i] * sine));
        to(j + kHalf, static_cast<T>(right[i] * cosine + left[i] * sine));
      } else {
        to(j, static_cast<T>(left[i]));
        to(j + kHalf, static_cast<T>(right[i]));
      }
    }
  }
}

template <class T, int kWidth, int kHeads>
struct Shared {
  Rotation<kWidth> rotation;
  alignas(16) T queries[kHeads][kWidth];
  alignas(16) T new_key[kWidth];
  T new_value[kWidth];
  // The warps' softmaxes.
  float most[kWarps][kHeads];
  float sum[kWarps][kHeads];
  float values[kWarps][kHeads][kWidth];
  float new_score[kHeads];
  std::uint64_t received;  // barrier: the other blocks' softmaxes have arrived
};

/// The softmax of a block's keys, in the form in which the block sends it to the first block of its cluster.
template <int kWidth>
struct Sent {
  float values[kWidth];
  float most;
  float sum;
};

/// The cached positions of a head, in their slots.
template <class T, int kWidth>
struct Cached {
  const T* keys;
  const T* values;
  std::int64_t begin;
  std::int64_t length;
  std::int64_t lap;  // the last position up to `begin` that belongs in slot 0
  std::int64_t capacity;

  __device__ bool has(std::int64_t position) const { return position < length; }
  /// The offset of a position's first column, or that of slot 0 if the position is not cached.
  __device__ std::int64_t offset(std::int64_t position) const {
    const std::int64_t ahead = position - lap;
    return has(position) ? (ahead < capacity ? ahead : ahead - capacity) * kWidth : 0;
  }
};

/// A warp's softmax of units of kKeys keys, computed by FMAs. A team of lanes has a key, with 16 bytes per lane.
template <class T, int kWidth, int kHeads>
struct TeamSoftmax {
  static constexpr int kPart = 16 / sizeof(T);  // columns per lane
  static constexpr int kTeam = kWidth / kPart;  // lanes
  static constexpr int kTeams = kWarp / kTeam;
  static_assert(kTeam <= kWarp);
  static constexpr int kAtOnce = 4;  // keys per team
  static constexpr int kKeys = kTeams * kAtOnce;
  using Pack = cuda::Pack<T, kPart>;

  /// Keys and values of a unit in shared memory. A lane only reads what it has copied itself.
  struct Staged {
    Pack packs[2][kAtOnce][kWarp];
  };

  float queries[kHeads][kPart];
  RunningSoftmax<kPart> softmax[kHeads];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int team() { return lane() / kTeam; }
  __device__ static int column() { return lane() % kTeam * kPart; }

  __device__ TeamSoftmax(const T (&from)[kHeads][kWidth], int heads, float scale) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        queries[h][i] = h < heads ? static_cast<float>(from[h][column() + i]) * scale : 0;
      }
    }
  }

  __device__ static void copy(Staged& to, const Cached<T, kWidth>& from, std::int64_t at) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const std::int64_t position = at + u * kTeams + team();
      const std::int64_t offset = from.offset(position) + column();
      cuda::copy_async<16>(&to.packs[0][u][lane()], from.keys + offset, from.has(position));
      cuda::copy_async<16>(&to.packs[1][u][lane()], from.values + offset, from.has(position));
    }
  }

  __device__ void add(const Staged& staged, int count) {
    float scores[kHeads][kAtOnce];
    const auto present = [&](int u) { return u * kTeams + team() < count; };
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      float of_key[kPart];
      cuda::unpack(staged.packs[0][u][lane()], of_key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          dot += queries[h][i] * of_key[i];
        }
        dot = cuda::sum_lanes<kTeam>(dot);
        scores[h][u] = present(u) ? dot : kLowest;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float most = softmax[h].most;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        most = fmaxf(most, scores[h][u]);
      }
      softmax[h].rescale(most);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        scores[h][u] = present(u) ? cuda::approximate_exp2(scores[h][u] - most) : 0;
        softmax[h].sum += scores[h][u];
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      float of_value[kPart];
      cuda::unpack(staged.packs[1][u][lane()], of_value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          softmax[h].values[i] += scores[h][u] * of_value[i];
        }
      }
    }
  }

  /// Merges the teams' softmaxes.
  __device__ void finish(float (&most)[kHeads], float (&sum)[kHeads], float (&values)[kHeads][kWidth]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      RunningSoftmax<kPart>& mine = softmax[h];
#pragma unroll
      for (int step = kTeam; step < kWarp; step *= 2) {
        const float other_most = __shfl_xor_sync(cuda::kAllLanes, mine.most, step);
        const float larger = fmaxf(mine.most, other_most);
        const float factor = cuda::approximate_exp2(other_most - larger);
        const float other_sum = __shfl_xor_sync(cuda::kAllLanes, mine.sum, step);
        float others[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          others[i] = __shfl_xor_sync(cuda::kAllLanes, mine.values[i], step);
        }
        mine.rescale(larger);
        mine.sum += factor * other_sum;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          mine.values[i] += factor * others[i];
        }
      }
      if (team() == 0) {
        most[h] = mine.most;
        sum[h] = mine.sum;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          values[h][column() + i] = mine.values[i];
        }
      }
    }
  }
};

/// The same, computed by tensor cores. Lane 4 g + t holds the scores of query head g with keys 2 t and 2 t + 1 of every
/// 8 keys. The first product returns them in these lanes, and the second one needs them in the same lanes.
///
///     scores (heads, keys) = queries (heads, D) · keysᵀ          lane: head g, keys 2 t and 2 t + 1
///     sums (D, heads) += valuesᵀ (D, keys) · weights (keys, heads)          lane: columns g and g + 8, heads 2 t and
///                                                                                2 t + 1
///
/// The terms of a score may be added in any order. So a lane takes 8 adjacent columns of every 32, the same ones of a
/// key and of a query.
template <class T, int kWidth, int kHeads>
struct TensorSoftmax {
  static constexpr int kKeys = 16;
  static constexpr int kPacks = kWidth / 32;  // packs of 16 bytes of a key, per lane
  static constexpr int kTiles = kWidth / 16;  // of 16 columns of values
  static constexpr int kChunks = kWidth / 8;  // chunks of 16 bytes in a row

  // The number of copies of values that are unrolled. With more, registers spill.
  static constexpr int kUnrolled = kWidth <= 128 ? kChunks / 2 : 4;

  struct Staged {
    uint4 keys[2][kPacks][kWarp];  // each lane's packs of the first and of the last 8 keys
    uint4 values[kKeys][kChunks];  // a row's chunks are swizzled
  };

  std::uint32_t queries[kPacks][4];  // pairs of columns of head g; 0 if there is no head g
  float sums[kTiles][4] = {};        // weighted values
  float most = kLowest;              // of head g
  float sum = 0;                     // of head g, of this lane's keys
  float scale;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int g() { return lane() / 4; }
  __device__ static int t() { return lane() % 4; }
  __device__ static int swizzled(int key, int chunk) { return chunk ^ (key % (kChunks < 8 ? kChunks : 8)); }

  __device__ TensorSoftmax(const T (&from)[kHeads][kWidth], int heads, float score_scale) : scale(score_scale) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      uint4 four = {};
      if (g() < heads) {
        four = *reinterpret_cast<const uint4*>(&from[g() % kHeads][32 * p + 8 * t()]);
      }
      queries[p][0] = four.x;
      queries[p][1] = four.y;
      queries[p][2] = four.z;
      queries[p][3] = four.w;
    }
  }

  __device__ static void copy(Staged& to, const Cached<T, kWidth>& from, std::int64_t at) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const std::int64_t position = at + 8 * tile + g();
      const T* const key = from.keys + from.offset(position) + 8 * t();
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        cuda::copy_async<16>(&to.keys[tile][p][lane()], key + 32 * p, from.has(position));
      }
    }
#pragma unroll(kUnrolled)
    for (int i = 0; i < kKeys * kChunks / kWarp; ++i) {
      const int at_chunk = i * kWarp + lane();
      const int key = at_chunk / kChunks;
      const int chunk = at_chunk % kChunks;
      const std::int64_t position = at + key;
      cuda::copy_async<16>(&to.values[key][swizzled(key, chunk)], from.values + from.offset(position) + 8 * chunk,
                           from.has(position));
    }
  }

  __device__ void add(const Staged& staged, int count) {
    float scores[2][4] = {};  // of 8 keys each; the last two of the four belong to heads that do not exist
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 key = staged.keys[tile][p][lane()];
        const std::uint32_t first[4] = {queries[p][0], 0, queries[p][1], 0};
        const std::uint32_t second[4] = {queries[p][2], 0, queries[p][3], 0};
        cuda::multiply_add_16_8_16<T>(scores[tile], first, key.x, key.y);
        cuda::multiply_add_16_8_16<T>(scores[tile], second, key.z, key.w);
      }
    }
    float largest = most;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool present = 8 * tile + 2 * t() + i < count;
        scores[tile][i] = present ? scores[tile][i] * scale : kLowest;
        largest = fmaxf(largest, scores[tile][i]);
      }
    }
    largest = cuda::reduce_lanes<4>(largest, [](float a, float b) { return fmaxf(a, b); });
    const float factor = cuda::approximate_exp2(most - largest);
    most = largest;
    sum *= factor;
    std::uint32_t weights[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool present = 8 * tile + 2 * t() + i < count;
        pair[i] = present ? cuda::approximate_exp2(scores[tile][i] - most) : 0;
        sum += pair[i];
      }
      const cuda::Pack<T, 2> rounded = cuda::pack_of<T>(pair);
      weights[tile] = reinterpret_cast<const std::uint32_t&>(rounded);
    }
    // The factors of heads 2 t and 2 t + 1.
    const float factors[2] = {__shfl_sync(cuda::kAllLanes, factor, 8 * t()),
                              __shfl_sync(cuda::kAllLanes, factor, 8 * t() + 4)};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[tile][i] *= factors[i % 2];
      }
      // The four matrices are columns 0 to 7 and columns 8 to 15 of the first 8 keys, then the same columns of the last
      // 8 keys.
      const int key = lane() / 16 * 8 + lane() % 8;
      const int chunk = 2 * tile + lane() / 8 % 2;
      std::uint32_t values[4];
      cuda::load_matrices_transposed(values, &staged.values[key][swizzled(key, chunk)]);
      cuda::multiply_add_16_8_16<T>(sums[tile], values, weights[0], weights[1]);
    }
  }

  __device__ void finish(float (&all_most)[kHeads], float (&all_sum)[kHeads], float (&values)[kHeads][kWidth]) {
    sum = cuda::sum_lanes<4>(sum);
    if (t() == 0 && g() < kHeads) {
      all_most[g()] = most;
      all_sum[g()] = sum;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * t() + i;
      if (head < kHeads) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          values[head][16 * tile + g()] = sums[tile][i];
          values[head][16 * tile + 8 + g()] = sums[tile][2 + i];
        }
      }
    }
  }
};

template <class T, int kWidth, int kHeads>
using WarpSoftmax =
    std::conditional_t<sizeof(T) == 2, TensorSoftmax<T, kWidth, kHeads>, TeamSoftmax<T, kWidth, kHeads>>;

/// Units per warp that are in flight at once. With more, fewer blocks would fit on a multiprocessor.
template <int kWidth>
inline constexpr int kStages = kWidth <= 64 ? 2 : 1;

/// A block of a cluster, and the steps of its attention.
template <class T, int kWidth, int kHeads>
struct AttentionBlock {
  using Softmax = WarpSoftmax<T, kWidth, kHeads>;
  using Staged = typename Softmax::Staged;
  static constexpr int kStages = kernels::kStages<kWidth>;

  const Arguments<T>& a;
  Shared<T, kWidth, kHeads>& shared;
  Staged* const staged;      // this warp's stages
  Sent<kWidth>* const sent;  // [other block][head]

  const int rank = static_cast<int>(blockIdx.x);  // in the cluster
  const int key_head = static_cast<int>(blockIdx.y) / a.parts;
  const int part = static_cast<int>(blockIdx.y) % a.parts;
  const std::int64_t sequence = blockIdx.z;
  const int group = a.heads / a.key_heads;
  const int first_head = part * kHeads;               // within the group
  const int heads = min(kHeads, group - first_head);  // of this cluster
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;

  const std::int64_t length = *a.length;
  const std::int64_t padding = a.padding == nullptr ? 0 : a.padding[sequence];
  const std::int64_t slot = length % a.capacity;
  // Attention sees the cached positions [begin, length).
  const std::int64_t begin = max(max(length - a.capacity + 1, std::int64_t{0}), padding);
  const int blocks = length - begin <= kKeysOfOne ? 1 : a.blocks;
  T* const keys = a.keys + (sequence * a.key_heads + key_head) * a.capacity * kWidth;
  T* const values = a.values + (sequence * a.key_heads + key_head) * a.capacity * kWidth;
  const Cached<T, kWidth> cached{.keys = keys,
                                 .values = values,
                                 .begin = begin,
                                 .length = length,
                                 .lap = begin - begin % a.capacity,
                                 .capacity = a.capacity};
  // The warp's units of keys.
  const std::int64_t step = static_cast<std::int64_t>(blocks) * kWarps * Softmax::kKeys;
  const std::int64_t first = begin + (rank * kWarps + warp) * Softmax::kKeys;

  __device__ AttentionBlock(const Arguments<T>& a, Shared<T, kWidth, kHeads>& shared, unsigned char* memory)
      : a(a),
        shared(shared),
        staged(reinterpret_cast<Staged*>(memory) + static_cast<int>(threadIdx.x) / kWarp * kStages),
        sent(reinterpret_cast<Sent<kWidth>*>(reinterpret_cast<Staged*>(memory) + kWarps * kStages)) {}

  __device__ void start_copies(std::int64_t at, int stage) const {
    if (at < length) {
      Softmax::copy(staged[stage], cached, at);
    }
    cuda::commit_copies();
  }

  __device__ void start_first_copies() const {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      start_copies(first + stage * step, stage);
    }
  }

  /// Prepares what does not depend on the new position's row: the barrier for the other blocks' results, and the
  /// angles.
  __device__ void prepare_block() const {
    if (blocks > 1 && threadIdx.x == 0) {
      cuda::init_barrier(&shared.received, 1);
      cuda::arrive_expecting(&shared.received, (blocks - 1) * heads * static_cast<int>(sizeof(Sent<kWidth>)));
      cuda::publish_barriers();
    }
    if (a.rotates) {
      shared.rotation.fill(a, max(length - padding, std::int64_t{0}));
    }
    __syncthreads();
    if (blocks > 1) {
      cuda::arrive_in_cluster();  // from here on, other blocks may send to this one
    }
  }

  /// Prepares the new position: the queries in all blocks, key and value in block 0. One cluster of the key head
  /// appends key and value to the cache.
  __device__ void prepare_position() const {
    for (int item = warp; item < heads + (rank == 0 ? 2 : 0); item += kWarps) {
      if (item < heads) {
        const T* const row = a.q + sequence * a.q_stride + (key_head * group + first_head + item) * kWidth;
        prepare<T, kWidth>(a, shared.rotation, row, a.q_norm, [&](int j, T value) { shared.queries[item][j] = value; });
      } else if (item == heads) {
        const T* const row = a.k + sequence * a.k_stride + key_head * kWidth;
        prepare<T, kWidth>(a, shared.rotation, row, a.k_norm, [&](int j, T value) {
          shared.new_key[j] = value;
          if (part == 0) {
            keys[slot * kWidth + j] = value;
          }
        });
      } else {
        const T* const row = a.v + sequence * a.v_stride + key_head * kWidth;
        for (int j = lane; j < kWidth; j += kWarp) {
          const T value = row[j];
          shared.new_value[j] = value;
          if (part == 0) {
            values[slot * kWidth + j] = value;
          }
        }
      }
    }
    __syncthreads();
  }

  /// The softmax of the warp's share of the cached keys.
  __device__ void attend_cached() const {
    Softmax softmax(shared.queries, heads, a.score_scale);
    int stage = 0;
    for (std::int64_t at = first; at < length; at += step) {
      cuda::wait_copies<kStages - 1>();
      __syncwarp();
      softmax.add(staged[stage], static_cast<int>(min(length - at, std::int64_t{Softmax::kKeys})));
      __syncwarp();
      start_copies(at + kStages * step, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    softmax.finish(shared.most[warp], shared.sum[warp], shared.values[warp]);
  }

  __device__ void score_new_key() const {
    for (int h = warp; rank == 0 && h < heads; h += kWarps) {
      float dot = 0;
#pragma unroll
      for (int j = 0; j < kWidth; j += kWarp) {
        dot += static_cast<float>(shared.queries[h][j + lane]) * static_cast<float>(shared.new_key[j + lane]);
      }
      dot = cuda::sum_lanes<kWarp>(dot);
      if (lane == 0) {
        shared.new_score[h] = dot * a.score_scale;
      }
    }
  }

  /// The largest score of head h among those that the block merges.
  __device__ float largest_score(int h) const {
    float most = shared.most[0][h];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      most = fmaxf(most, shared.most[w][h]);
    }
    if (rank == 0) {
      most = fmaxf(most, shared.new_score[h]);
      for (int block = 1; block < blocks; ++block) {
        most = fmaxf(most, sent[(block - 1) * kHeads + h].most);
      }
    }
    return most;
  }

  /// Adds up the softmaxes of the block's warps. Block 0 also adds the new key and the softmaxes of the cluster's other
  /// blocks, and writes y; the others send it their sums.
  __device__ void merge() const {
    T* const y = a.y + sequence * a.heads * kWidth + static_cast<std::int64_t>(key_head * group + first_head) * kWidth;
    if (blocks > 1) {
      rank == 0 ? cuda::wait(&shared.received, 0) : cuda::wait_for_cluster();
    }
    for (int i = static_cast<int>(threadIdx.x); i < heads * kWidth; i += kThreads) {
      const int h = i / kWidth;
      const int j = i % kWidth;
      const float most = largest_score(h);
      float sum = 0;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = cuda::approximate_exp2(shared.most[w][h] - most);
        sum += factor * shared.sum[w][h];
        total += factor * shared.values[w][h][j];
      }
      if (rank == 0) {
        const float weight = cuda::approximate_exp2(shared.new_score[h] - most);
        sum += weight;
        total += weight * static_cast<float>(shared.new_value[j]);
        for (int block = 1; block < blocks; ++block) {
          const Sent<kWidth>& other = sent[(block - 1) * kHeads + h];
          const float factor = cuda::approximate_exp2(other.most - most);
          sum += factor * other.sum;
          total += factor * other.values[j];
        }
        y[i] = static_cast<T>(total / sum);
      } else {
        Sent<kWidth>& to = sent[(rank - 1) * kHeads + h];
        cuda::send(&to.values[j], 0, total, &shared.received);
        if (j == 0) {
          cuda::send(&to.most, 0, most, &shared.received);
          cuda::send(&to.sum, 0, sum, &shared.received);
        }
      }
    }
  }
};

template <class T, int kWidth, int kHeads>
__global__ void __launch_bounds__(kThreads, kWidth <= 128 ? 3 : 1)
    decode_attention_kernel(const __grid_constant__ Arguments<T> a) {
  __shared__ Shared<T, kWidth, kHeads> shared;
  extern __shared__ __align__(16) unsigned char memory[];
  cuda::allow_dependents();
  if (!a.ready_early) {
    cuda::wait_for_previous_kernel();
  }
  const AttentionBlock<T, kWidth, kHeads> block(a, shared, memory);
  if (block.rank >= block.blocks) {
    return;
  }
  block.start_first_copies();
  block.prepare_block();
  if (a.ready_early) {
    cuda::wait_for_previous_kernel();
  }
  block.prepare_position();
  block.attend_cached();
  block.score_new_key();
  __syncthreads();
  block.merge();
}

// The more sequences there are, the fewer blocks share one, so that all blocks of the grid can run at once.
int blocks_of_cluster(std::int64_t clusters) {
  int blocks = cuda::device_has_clusters() ? kClusterBlocks : 1;
  while (blocks > 1 && clusters * blocks > kMostBlocks) {
    blocks /= 2;
  }
  return blocks;
}

template <class T>
Arguments<T> arguments(const DecodeAttentionArgs& args, int heads_at_once) {
  const DecodeAttention& p = args.problem;
  const auto group = static_cast<int>(p.heads / p.key_heads());
  Arguments<T> a{.q = p.q.data<T>(),
                 .k = p.k.data<T>(),
                 .v = p.v.data<T>(),
                 .q_stride = p.q.strides()[0],
                 .k_stride = p.k.strides()[0],
                 .v_stride = p.v.strides()[0],
                 .q_norm = p.q_norm.data_or_null<T>(),
                 .k_norm = p.k_norm.data_or_null<T>(),
                 .keys = p.keys.data<T>(),
                 .values = p.values.data<T>(),
                 .length = p.length.data<std::int64_t>(),
                 .padding = p.padding.data_or_null<std::int64_t>(),
                 .y = args.y.data<T>(),
                 .heads = static_cast<int>(p.heads),
                 .key_heads = static_cast<int>(p.key_heads()),
                 .parts = (group + heads_at_once - 1) / heads_at_once,
                 .blocks = 1,
                 .ready_early = p.ready_early,
                 .capacity = p.keys.size(2),
                 .eps = static_cast<float>(p.eps),
                 .score_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(p.width()))),
                 .rotates = !p.frequencies.empty(),
                 .rotary_scale = p.rotary_scale,
                 .frequencies = {}};
  a.blocks = blocks_of_cluster(p.keys.size(0) * a.key_heads * a.parts);
  std::copy(p.frequencies.begin(), p.frequencies.end(), a.frequencies);
  return a;
}

template <class T, int kWidth, int kHeads>
void launch(const DecodeAttentionArgs& args) {
  const Arguments<T> a = arguments<T>(args, kHeads);
  const dim3 grid(static_cast<unsigned>(a.blocks), static_cast<unsigned>(a.key_heads * a.parts),
                  static_cast<unsigned>(args.problem.keys.size(0)));
  const std::size_t staged = sizeof(typename WarpSoftmax<T, kWidth, kHeads>::Staged) * kWarps * kStages<kWidth>;
  cuda::Launch(grid, kThreads, staged + (a.blocks - 1) * kHeads * sizeof(Sent<kWidth>))
      .cluster(dim3(static_cast<unsigned>(a.blocks)))
      .dependent()
      .run(decode_attention_kernel<T, kWidth, kHeads>, "decode_attention_kernel", a);
}

template <class T, int kWidth>
void with_heads(const DecodeAttentionArgs& args) {
  const std::int64_t group = args.problem.heads / args.problem.key_heads();
  if (group == 1) {
    launch<T, kWidth, 1>(args);
  } else if (group == 2) {
    launch<T, kWidth, 2>(args);
  } else {
    launch<T, kWidth, 4>(args);
  }
}

}  // namespace

void decode_attention(Cuda, const DecodeAttentionArgs& args) {
  on_dtype(Types<float, Float16, BFloat16>{}, args.y.dtype(), "decode_attention", [&]<class T>() {
    switch (args.problem.width()) {
      case 32: return with_heads<T, 32>(args);
      case 64: return with_heads<T, 64>(args);
      case 128: return with_heads<T, 128>(args);
      default:
        if constexpr (sizeof(T) == 2) {
          return with_heads<T, 256>(args);
        }
    }
  });
}

}  // namespace mica::kernels
