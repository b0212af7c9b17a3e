#pragma once

// The decoder step's products: how outputs are split among blocks, the stages of weights, and the threads that multiply
// and those that add. See decoder_step_sm90.cu.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/mma.cuh>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/ops/decode/detail/decoder_step.cuh>
#include <mica/ops/decode/detail/packed_pair.cuh>
#include <mica/ops/decode/detail/running_softmax.cuh>

namespace mica::kernels::decoder {

/// A phase that multiplies: out = f(norm(in) · Wᵀ + bias) + residual.
template <class T>
struct Product {
  const Weight<T>* weights;  // one, or several side by side
  int depth;
  int outputs;  // of f: half of the weights' with swiglu
  bool swiglu;
  bool adds_residual;
  bool is_spread;              // groups of rows go round the blocks; else each block has neighboring rows
  const T* norm;               // or null
  const std::uint32_t* in;     // null: the step's x
  std::uint32_t* out;          // null: the logits
  const std::uint32_t* parts;  // or null: of in, if attention was split
  const std::uint32_t* stats;
};

inline constexpr int kLayerProducts = 4;

/// The products in their order: four of each layer, then the head's. Layers and head are in shared memory: parameters
/// of the kernel are in constant memory, whose cache is too small for them.
template <class T>
__device__ Product<T> product(const Arguments<T>& a, std::uint32_t* of_step, const Layer<T>* layers,
                              const Weight<T>* head, int number) {
  const int layer = number / kLayerProducts;
  const Words words(a, of_step, layer);
  const std::uint32_t* const in = number == 0 ? nullptr : words.previous_out(a.layer_words);
  Product<T> p{};
  p.depth = a.width;
  p.outputs = a.width;
  if (layer == a.layer_count) {
    p.weights = head;
    p.outputs = head->outputs;
    p.is_spread = true;
    p.norm = a.norm;
    p.in = in;
    return p;
  }
  const Layer<T>& l = layers[layer];
  switch (number % kLayerProducts) {
    case 0:
      p.weights = l.qkv;
      p.outputs = (a.heads + 2 * a.key_heads) * a.head_width;
      p.norm = l.input_norm;
      p.in = in;
      p.out = words.qkv;
      break;
    case 1:
      p.weights = &l.o;
      p.depth = a.heads * a.head_width;
      p.adds_residual = true;
      p.in = words.attention;
      p.out = words.sum;
      p.parts = words.parts;
      p.stats = words.stats;
      break;
    case 2:
      p.weights = l.gate_up;
      p.outputs = a.hidden;
      p.swiglu = true;
      p.norm = l.post_norm;
      p.in = words.sum;
      p.out = words.hidden;
      break;
    default:
      p.weights = &l.down;
      p.depth = a.hidden;
      p.adds_residual = true;
      p.in = words.hidden;
      p.out = words.out;
  }
  return p;
}

/// This block's outputs of a product, whole units, and the rows of weights for them. With swiglu, 8 rows of the gate
/// and the same 8 of up alternate.
template <class T>
struct Share {
  int first;
  int outputs;
  int stride;  // from a group of 8 rows to the next

  __device__ Share(const Product<T>& p, int unit) {
    const auto blocks = static_cast<int>(gridDim.x);
    const auto block = static_cast<int>(blockIdx.x);
    if (p.is_spread) {
      first = block * kStageRows;
      stride = blocks * kStageRows;
      const int rounds = p.outputs / stride;
      outputs = rounds * kStageRows + min(max(p.outputs - rounds * stride - first, 0), kStageRows);
    } else {
      const auto units = static_cast<unsigned>(p.outputs / unit);
      first = static_cast<int>(units * blockIdx.x / gridDim.x) * unit;
      outputs = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * unit - first;
      stride = kStageRows;
    }
  }

  __device__ int groups(const Product<T>& p) const {
    return (outputs + kStageRows - 1) / kStageRows * (p.swiglu ? 2 : 1);
  }

  struct Row {
    const Weight<T>* weight;  // null: none
    int row;                  // of the weight
    int output;               // of the product
  };
  __device__ Row row(const Product<T>& product, int slot) const {
    const int local = product.swiglu ? slot / (2 * kStageRows) * kStageRows + slot % kStageRows : slot;
    if (local >= outputs) {
      return {nullptr, 0, 0};
    }
    const int output = first + local / kStageRows * stride + local % kStageRows;
    int part = product.swiglu ? slot / kStageRows % 2 : 0;
    int row = output;
    if (!product.swiglu) {
      while (row >= product.weights[part].outputs) {
        row -= product.weights[part++].outputs;
      }
    }
    return {product.weights + part, row, output};
  }
};

/// A block's part of a product. One warp prepares them, as the others have no time to.
template <class T>
struct Job {
  Product<T> product;
  Share<T> share;
  int groups;
  int segments;

  __device__ Job(const Arguments<T>& a, std::uint32_t* of_step, const Layer<T>* layers, const Weight<T>* head,
                 int number, int unit)
      : product(decoder::product(a, of_step, layers, head, number)),
        share(product, unit),
        groups(share.groups(product)),
        segments((product.depth + kSegment - 1) / kSegment) {}
};

/// The stages in shared memory.
struct Ring {
  char* stages;
  std::uint64_t* full;
  std::uint64_t* empty;
  int count;
  int bytes;
  int stage = 0;
  unsigned parity = 0;

  __device__ char* here() const { return stages + stage * bytes; }
  __device__ void advance() {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Octet {
  std::uint32_t pairs[4];
};
__device__ inline Octet load_octet(const void* from) {
  const uint4 bits = *static_cast<const uint4*>(from);
  return {{bits.x, bits.y, bits.z, bits.w}};
}

/// A lane's part of a slice of x. A lane's octet of a row of weights, 4 pairs, makes one row of the tensor cores' first
/// operand, rows g and g + 8, two of them: pairs 0 and 2 belong to row g, 1 and 3 to row g + 8. So even columns of the
/// second operand are x at the former, odd ones at the latter; and the sums are results (g, 0) and (g + 8, 1). In
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

/// Weights of T. A stage has up to 1,024 terms of each of 8 rows.
template <class T>
struct FloatWeights {
  static constexpr bool kIsPacked = false;
  static constexpr int kUnit = 2;                                             // outputs: a word
  static constexpr int kPitch = kSegment * static_cast<int>(sizeof(T)) + 64;  // bytes; lanes of two rows, other banks
  static constexpr int kStageBytes = kStageRows * kPitch;
  static constexpr int kStageGroups = 1;
  static constexpr int kExtra = 0;
  static constexpr int kArrivals = kStageRows;  // of a stage's copies

  /// By a warp. A bulk copy takes a warp some 50 cycles, so that two warps take turns.
  __device__ static void copy(const Arguments<T>&, const Job<T>& job, int group, int, int segment, int copier,
                              const Ring& ring) {
    const int lane = copier % kWarp;
    const auto row = job.share.row(job.product, lane < kStageRows ? group * kStageRows + lane : 1 << 30);
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

  /// Past the product's depth, x is 0, and the stage holds whatever it held before: finite numbers.
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

/// Weights of 4 or 8 bits, whose words hold neighbors along the depth. With the scale s and the zero z of a group,
///
///     sum += s · (Σ x · (q + b) − (z + b) · Σ x)        b: what the conversion to T adds to an integer
template <class T, int kBits>
struct PackedWeights {
  static constexpr bool kIsPacked = true;
  static constexpr int kUnit = kStageRows;
  static constexpr int kStageGroups = 4;
  static constexpr int kExtra = kBits == 4 ? kStageGroups : 0;
  static constexpr int kOctetWords = kBits / 4;
  static constexpr int kWordRows = kSegment / kOctet * kOctetWords;
  static constexpr int kGroups = kSegment / kGroupTerms;  // of a segment, at least
  static constexpr int kWordBytes = kWordRows * kStageRows * 4;
  static constexpr int kScaleBytes = kGroups * kStageRows * static_cast<int>(sizeof(T));
  static constexpr int kPieceBytes = kWordBytes + 2 * kScaleBytes + 32;  // 8 rows' words, scales, zeros; other banks
  static constexpr int kStageBytes = kStageGroups * kPieceBytes;
  static constexpr int kArrivals = kCopiers;
  static constexpr float kAdded = kPackedAdded<T, kBits>;

  /// By all copiers: `count` groups of rows.
  __device__ static void copy(const Arguments<T>& a, const Job<T>& job, int group, int count, int segment, int copier,
                              const Ring& ring) {
    // 16 bytes are 4 outputs of a row of words, or 8 of a row of scales. Threads that follow each other copy what
    // follows each other.
    const int columns = count == 1 ? 2 : 2 * kStageGroups;
    const int rows = kCopiers / columns;  // at once
    const int column = copier % columns;
    const int first = copier / columns;
    const int mine = column / 2;
    const int half = column % 2;
    if (mine < count) {
      const auto row = job.share.row(job.product, (group + mine) * kStageRows);  // units are whole groups
      const Weight<T>& w = *row.weight;
      const int outputs = w.outputs;
      const int terms = min(kSegment, job.product.depth - segment * kSegment);
      const std::uint32_t piece = cuda::shared_address(ring.here()) + mine * kPieceBytes;
      const int word_rows = terms / kOctet * kOctetWords;
      const auto* from = static_cast<const std::uint32_t*>(w.data) +
                         static_cast<std::int64_t>(segment * kWordRows + first) * outputs + row.row + half * 4;
      std::uint32_t to = piece + first * kStageRows * 4 + half * 16;
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
          cuda::copy_async<16>(piece + kWordBytes + i * kStageRows * static_cast<int>(sizeof(T)), scales);
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
    const char* const piece = stage + group * kPieceBytes;
    const auto* const words = reinterpret_cast<const std::uint32_t*>(piece);
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
#pragma unroll
      for (int w = 0; w < kOctetWords; ++w) {
        const int octet = (warp * kSlice + c * kChunk) / kOctet + lane % 4;
        f.words[c][w] = words[(octet * kOctetWords + w) * kStageRows + lane / 4];
      }
    }
    const T* const scales =
        reinterpret_cast<const T*>(piece + kWordBytes) + warp * kSliceGroups * kStageRows + lane / 4;
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

/// The warps' sums of a batch of rows, which the finishers add. Two buffers, so that the consumers go on meanwhile.
struct Sums {
  float rows[2][kConsumerWarps][kBatchRows];
  alignas(16) float squares[2][kConsumerWarps];  // of a product's first batch
  __device__ static void meet(int buffer) {
    if (buffer == 0) {
      cuda::barrier_sync(2, kConsumers + kFinishers);
    } else {
      cuda::barrier_sync(3, kConsumers + kFinishers);
    }
  }
};

/// A consumer thread's view of the block.
template <class T>
struct Consumer {
  const Arguments<T>& a;
  Ring ring;
  T* x;           // [segment][warp][slice]
  float* x_sums;  // of groups
  Sums& sums;
  int splits;      // of attention
  int buffer = 0;  // of sums

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static void synchronize() { cuda::barrier_sync(1, kConsumers); }

  /// A lane's four elements of x, from term `at`, to shared memory.
  template <class W>
  __device__ void store_x(int at, std::uint32_t first, std::uint32_t second) {
    const bool is_odd = lane() % 2 != 0;
    if constexpr (W::kIsPacked) {
      const float2 values = unpack_pair<T>(first);
      const float2 others = unpack_pair<T>(second);
      float sum = values.x + values.y + (others.x + others.y);
      // The integers of an octet are converted in pairs (c, c + 4). Two lanes have it.
      const std::uint32_t other = __shfl_xor_sync(cuda::kAllLanes, is_odd ? first : second, 1);
      const std::uint32_t low = is_odd ? other : first;
      const std::uint32_t high = is_odd ? second : other;
      first = __byte_perm(low, high, 0x5410);
      second = __byte_perm(low, high, 0x7632);
#pragma unroll
      for (int step = kGroupTerms / kQuad / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(cuda::kAllLanes, sum, step);
      }
      if (lane() % (kGroupTerms / kQuad) == 0) {
        x_sums[at / kGroupTerms] = sum;
      }
    }
    auto* const octet = reinterpret_cast<std::uint32_t*>(x) + at / kOctet * (kOctet / 2);
    octet[is_odd ? 1 : 0] = first;
    octet[is_odd ? 3 : 2] = second;
  }

  /// The warp's slices of some segments of the product's input, weighted by the norm, to shared memory. Returns the
  /// lane's part of the sum of squares.
  template <class W, int kSegments>
  __device__ float receive_segments(const Product<T>& p, int first_segment) {
    const int begin = first_segment * kSegment + warp() * kSlice + lane() * kQuad;
    WordsOf<2> pairs[kSegments];
    uint2 norms[kSegments];
    bool has[kSegments];
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
      const int at = begin + i * kSegment;
      has[i] = at < p.depth;
      norms[i] = p.norm != nullptr && has[i] ? __ldg(reinterpret_cast<const uint2*>(p.norm + at)) : uint2{};
    }
    if (p.in != nullptr) {
      const std::uint32_t* const in = p.in + begin / 2;
      await([in](int i) { return in + i * (kSegment / 2); }, has, pairs);
    } else {
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        const uint2 own = has[i] ? *reinterpret_cast<const uint2*>(a.x + begin + i * kSegment) : uint2{};
        pairs[i] = {own.x, own.y};
      }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
      auto& [first, second] = pairs[i].at;
      if (p.norm != nullptr) {
        const float2 value = unpack_pair<T>(first);
        const float2 other = unpack_pair<T>(second);
        const float2 factor = unpack_pair<T>(norms[i].x);
        const float2 other_factor = unpack_pair<T>(norms[i].y);
        squares += value.x * value.x + value.y * value.y + (other.x * other.x + other.y * other.y);
        first = pack_pair<T>(value.x * factor.x, value.y * factor.y);
        second = pack_pair<T>(other.x * other_factor.x, other.y * other_factor.y);
      }
      store_x<W>(begin + i * kSegment, first, second);
    }
    return squares;
  }

  /// The warp's slice of a segment of attention's result, of which blocks have computed parts.
  template <class W>
  __device__ void receive_parts(const Product<T>& p, int segment) {
    constexpr int kAtOnce = 4;
    const int at = segment * kSegment + warp() * kSlice + lane() * kQuad;
    const int head = at / a.head_width;
    const std::uint32_t* const parts = p.parts + head * kMostSplits * a.head_width + at % a.head_width;
    const std::uint32_t* const stats = p.stats + head * kMostSplits * 2;
    float most = kLowest;
    float sum = 0;
    float total[kQuad] = {};
#pragma unroll 1
    for (int first = 0; first < splits; first += kAtOnce) {
      WordsOf<kQuad> values[kAtOnce];
      WordsOf<2> of_part[kAtOnce];
      bool has[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        has[i] = at < p.depth && first + i < splits;
      }
      request([&](int i) { return stats + (first + i) * 2; }, has, of_part);
      await([&](int i) { return parts + (first + i) * a.head_width; }, has, values);
      await_requested([&](int i) { return stats + (first + i) * 2; }, of_part);
      float new_most = most;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        new_most = has[i] ? fmaxf(new_most, __uint_as_float(of_part[i].at[0])) : new_most;
      }
      const float before = cuda::approximate_exp2(most - new_most);
      most = new_most;
      sum *= before;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        total[j] *= before;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float factor = has[i] ? cuda::approximate_exp2(__uint_as_float(of_part[i].at[0]) - most) : 0;
        sum += factor * __uint_as_float(of_part[i].at[1]);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          total[j] += factor * __uint_as_float(values[i].at[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      total[j] = at < p.depth ? __fdividef(total[j], sum) : 0;
    }
    store_x<W>(at, pack_pair<T>(total[0], total[1]), pack_pair<T>(total[2], total[3]));
  }

  /// The same of all segments.
  template <class W, bool kMayBeParts>
  __device__ float receive(const Product<T>& p, int segments) {
    constexpr int kAtOnce = kSegmentsAtOnce;
    float squares = 0;
    if (kMayBeParts && p.parts != nullptr && splits > 1) {
#pragma unroll 1
      for (int segment = 0; segment < segments; ++segment) {
        receive_parts<W>(p, segment);
      }
    } else if (segments == 1) {
      squares = receive_segments<W, 1>(p, 0);
    } else {
#pragma unroll 1
      for (int first = 0; first < segments; first += kAtOnce) {
        squares += receive_segments<W, kAtOnce>(p, first);
      }
    }
    __syncwarp();
    return squares;
  }

  /// Loads `count` groups of rows from stages of up to kStageGroups.
  template <class W, int kStageGroups, int kCount, class F>
  __device__ void take(typename W::Fragment (&fragments)[kCount], int count, const F& terms) {
    Ring at = ring;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < count) {
        if (j % kStageGroups == 0) {
          cuda::wait(at.full + at.stage, at.parity);
        }
        W::load(fragments[j], at.here(), j % kStageGroups, warp(), lane(), terms(j));
        if (j % kStageGroups == kStageGroups - 1) {
          at.advance();
        }
      }
    }
    __syncwarp();
    const int stages = (count + kStageGroups - 1) / kStageGroups;
    if (lane() < stages) {
      const int stage = ring.stage + lane();
      cuda::arrive(ring.empty + (stage < ring.count ? stage : stage - ring.count));
    }
    ring.stage += stages;
    if (ring.stage >= ring.count) {
      ring.stage -= ring.count;
      ring.parity ^= 1;
    }
  }

  /// A batch's sums are written.
  __device__ void hand_to_finishers(const Product<T>& p, bool is_first, float squares) {
    if (is_first && p.norm != nullptr) {
      squares = cuda::sum_lanes<kWarp>(squares);
      if (lane() == 0) {
        sums.squares[buffer][warp()] = squares;
      }
    }
    sums.meet(buffer);
    buffer ^= 1;
  }

  /// The block's part of a product, in batches of rows, and these in rounds of groups, which the warp holds in
  /// registers. A block without outputs has nothing to wait for.
  template <class W>
  __device__ void multiply(const Job<T>& job) {
    if (job.segments > 1) {
      multiply_segments<W>(job);
    } else if (W::kExtra > 0 && job.product.swiglu) {
      multiply_segment<W, W::kExtra>(job);
    } else {
      multiply_segment<W, 0>(job);
    }
  }

  /// If x is one segment, a lane keeps its part of it. kExtra: groups beyond kAhead that the warp holds while it waits
  /// for x.
  template <class W, int kExtra>
  __device__ void multiply_segment(const Job<T>& job) {
    const Product<T>& p = job.product;
    const int groups = job.groups;
    const int depth = p.depth - warp() * kSlice;
    const auto terms = [depth](int) { return depth; };
    using Fragment = typename W::Fragment;
    LaneX of_lane;
    float of_groups[kSliceGroups];
    float squares = 0;
#pragma unroll 1
    for (int done = 0; done < groups; done += kBatchGroups) {
      const int count = min(kBatchGroups, groups - done);
      float* const to = sums.rows[buffer][warp()] + lane() / 4;
      const auto put = [&](int group, const Fragment& fragment) {
        const float part = W::multiply(fragment, of_lane, of_groups);
        if (lane() % 4 == 0) {
          to[group * kStageRows] = part;
        }
      };
      int first = 0;
      do {
        Fragment fragments[kAhead];
        Fragment extra[kExtra > 0 ? kExtra : 1];
        take<W, W::kStageGroups>(fragments, min(count - first, kAhead), terms);
        const bool has_extra = kExtra > 0 && first == 0 && count > kAhead;
        if (has_extra) {
          take<W, W::kStageGroups>(extra, min(count - kAhead, kExtra), terms);
        }
        if (done + first == 0) {
          squares = receive<W, kExtra == 0>(p, 1);
          of_lane.load(x + warp() * kSlice, lane());
          if constexpr (W::kIsPacked) {
#pragma unroll
            for (int i = 0; i < kSliceGroups; ++i) {
              of_groups[i] = x_sums[warp() * kSliceGroups + i];
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (first + j < count) {
            put(first + j, fragments[j]);
          }
        }
        first += kAhead;
        if (has_extra) {
#pragma unroll
          for (int j = 0; j < kExtra; ++j) {
            if (first + j < count) {
              put(first + j, extra[j]);
            }
          }
          first += kExtra;
        }
      } while (first < count);
      hand_to_finishers(p, done == 0, squares);
    }
  }

  template <class W>
  __device__ void multiply_segments(const Job<T>& job) {
    const Product<T> p = job.product;
    const int groups = job.groups;
    const int segments = job.segments;
    const int depth = p.depth - warp() * kSlice;
#pragma unroll 1
    for (int done = 0; done < groups; done += kBatchGroups) {
      const int steps = min(kBatchGroups, groups - done) * segments;
      float squares = 0;
      float sum = 0;
      int segment = 0;
      int group = 0;
#pragma unroll 1
      for (int first = 0; first < steps; first += kAhead) {
        typename W::Fragment stages[kAhead];
        int begins[kAhead];  // of the stages' slices
        int at = segment;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          begins[j] = at * kSegment;
          at = at + 1 == segments ? 0 : at + 1;
        }
        take<W, 1>(stages, min(steps - first, kAhead), [&](int j) { return depth - begins[j]; });
        if (done + first == 0) {
          squares = receive<W, true>(p, segments);
        }
        float parts[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          LaneX of_lane;
          of_lane.load(x + begins[j] + warp() * kSlice, lane());
          parts[j] = W::multiply(stages[j], of_lane, x_sums + begins[j] / kGroupTerms + warp() * kSliceGroups);
        }
        float(&of_warp)[kBatchRows] = sums.rows[buffer][warp()];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          sum += first + j < steps ? parts[j] : 0;
          if (++segment == segments && first + j < steps) {
            if (lane() % 4 == 0) {
              of_warp[group * kStageRows + lane() / 4] = sum;
            }
            sum = 0;
            segment = 0;
            ++group;
          }
        }
      }
      hand_to_finishers(p, done == 0, squares);
    }
  }
};

/// A thread that adds the warps' sums of one row of each batch, and hands over the outputs.
template <class T>
struct Finisher {
  const Arguments<T>& a;
  Sums& sums;
  int thread;
  int buffer = 0;
  float residual = 0;  // of this thread's row of o_proj and down_proj

  /// The step's x of that row.
  __device__ void read_residual(const Share<T>& share) {
    if (thread < share.outputs) {
      residual = static_cast<float>(a.x[share.first + thread]);
    }
  }

  __device__ void finish(const Job<T>& job) {
    const Product<T> p = job.product;
    float inverse = 1;
    for (int done = 0; done < job.groups; done += kBatchGroups) {
      const auto row = job.share.row(p, done * kStageRows + thread);
      const bool has = row.weight != nullptr;
      const float bias = has && row.weight->bias != nullptr ? static_cast<float>(row.weight->bias[row.row]) : 0;
      sums.meet(buffer);
      float value = 0;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) {
        value += sums.rows[buffer][w][thread];
      }
      if (p.norm != nullptr) {
        if (done == 0) {
          float squares = 0;
#pragma unroll
          for (int w = 0; w < kConsumerWarps; ++w) {
            squares += sums.squares[buffer][w];
          }
          inverse = rsqrtf(squares / static_cast<float>(p.depth) + a.eps);
        }
        value *= inverse;
      }
      buffer ^= 1;
      hand_over(p, row.output, has, value + bias);
    }
  }

  __device__ void hand_over(const Product<T>& p, int output, bool has, float value) {
    if (p.swiglu) {
      const float up = __shfl_xor_sync(cuda::kAllLanes, value, kStageRows);
      value = __fdividef(value, 1 + __expf(-value)) * up;
      has = has && thread / kStageRows % 2 == 0;
    }
    if (p.adds_residual) {
      value = static_cast<float>(static_cast<T>(value + residual));
      residual = value;
    }
    const float next = __shfl_down_sync(cuda::kAllLanes, value, 1);
    if (has && thread % 2 == 0) {
      const std::uint32_t pair = pack_pair<T>(value, next);
      if (p.out != nullptr) {
        publish(p.out + output / 2, pair);
      } else {
        reinterpret_cast<std::uint32_t*>(a.logits)[output / 2] = pair;
      }
    }
  }
};

}  // namespace mica::kernels::decoder
