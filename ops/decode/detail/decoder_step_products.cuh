#pragma once

// The decoder step's products: how outputs are split among blocks, the stages of weights, and the threads that multiply
// and those that add. See decoder_step_cuda.cu.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/mma.cuh>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/ops/decode/detail/decoder_step.cuh>
#include <mica/ops/decode/detail/packed_pair.cuh>

namespace mica::kernels::decoder {

/// A phase that multiplies: out = f(norm(in) · Wᵀ + bias) + residual.
template <class T>
struct Product {
  const Weight<T>* parts;
  int depth;
  int outputs;  // of f: half of the weights' with swiglu
  bool swiglu;
  bool adds_residual;
  const T* norm;            // or null
  const std::uint64_t* in;  // null: the step's x
  std::uint64_t* out;       // null: the logits
};

inline constexpr int kLayerProducts = 4;

/// The products in their order: four of each layer, then the head's. The layers are in shared memory: parameters of the
/// kernel are in constant memory, whose cache is too small for them.
template <class T>
__device__ Product<T> product(const Arguments<T>& a, const Layer<T>* layers, int number) {
  const int layer = number / kLayerProducts;
  const Words words(a, layer);
  const std::uint64_t* const in = number == 0 ? nullptr : words.previous_out(a.layer_words);
  if (layer == a.layer_count) {
    return {&a.head, a.width, a.head.outputs, false, false, a.norm, in, nullptr};
  }
  const Layer<T>& l = layers[layer];
  switch (number % kLayerProducts) {
    case 0:
      return {l.qkv, a.width, (a.heads + 2 * a.key_heads) * a.head_width, false, false, l.input_norm, in, words.qkv};
    case 1: return {&l.o, a.heads * a.head_width, a.width, false, true, nullptr, words.attention, words.sum};
    case 2: return {l.gate_up, a.width, a.hidden, true, false, l.post_norm, words.sum, words.hidden};
    default: return {&l.down, a.hidden, a.width, false, true, nullptr, words.hidden, words.out};
  }
}

/// This block's outputs of a product, whole units, and the rows of weights for them. With swiglu, 8 rows of the gate
/// and the same 8 of up alternate.
template <class T>
struct Share {
  int first;
  int outputs;

  __device__ Share(const Product<T>& p, int unit) {
    const unsigned units = static_cast<unsigned>(p.outputs / unit);
    first = static_cast<int>(units * blockIdx.x / gridDim.x) * unit;
    outputs = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * unit - first;
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
    int part = product.swiglu ? slot / kStageRows % 2 : 0;
    int row = first + local;
    if (!product.swiglu) {
      while (row >= product.parts[part].outputs) {
        row -= product.parts[part++].outputs;
      }
    }
    return {product.parts + part, row, first + local};
  }
};

/// A block's part of a product. One warp prepares them, as the others have no time to.
template <class T>
struct Job {
  Product<T> product;
  Share<T> share;
  int groups;
  int segments;

  __device__ Job(const Arguments<T>& a, const Layer<T>* layers, int number, int unit)
      : product(decoder::product(a, layers, number)),
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

/// Weights of T. A stage has up to 1,024 terms of each of 8 rows.
template <class T>
struct FloatWeights {
  static constexpr bool kIsPacked = false;
  static constexpr int kUnit = 2;                                             // outputs: a word
  static constexpr int kPitch = kSegment * static_cast<int>(sizeof(T)) + 64;  // bytes; lanes of two rows, other banks
  static constexpr int kStageBytes = kStageRows * kPitch;
  static constexpr int kCopiers = kWarp;
  static constexpr int kArrivals = kStageRows;  // of a stage's copies

  __device__ static int position(int term) { return term; }  // of an octet's terms in x

  __device__ static void copy(const Arguments<T>&, const Job<T>& job, int group, int segment, int lane,
                              const Ring& ring) {
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

  /// The slice's first `terms` terms, then zeros.
  __device__ static void load(Fragment& f, const char* stage, int warp, int lane, int terms) {
    const char* const from =
        stage + lane / 4 * kPitch + (warp * kSlice + lane % 4 * kOctet) * static_cast<int>(sizeof(T));
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
      f.chunks[c] = load_octet(from + c * kChunk * static_cast<int>(sizeof(T)));
    }
    if (terms < kSlice) {
#pragma unroll
      for (int c = 0; c < kSliceChunks; ++c) {
        f.chunks[c] = c * kChunk < terms ? f.chunks[c] : Octet{};
      }
    }
  }

  /// Row g's products with the x of both stages.
  __device__ static void multiply(const Fragment& even, const Fragment& odd, const Octet (&x)[kSliceChunks],
                                  const float*, const float*, float (&result)[2]) {
    float sums[2][4] = {};
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t rows[4] = {even.chunks[c].pairs[2 * step], odd.chunks[c].pairs[2 * step],
                                       even.chunks[c].pairs[2 * step + 1], odd.chunks[c].pairs[2 * step + 1]};
        cuda::multiply_add_16_8_16<T>(sums[step], rows, x[c].pairs[2 * step], x[c].pairs[2 * step + 1]);
      }
    }
    result[0] = sums[0][0] + sums[1][0];
    result[1] = sums[0][3] + sums[1][3];
  }
};

/// Weights of 4 or 8 bits, whose words hold neighbors along the depth. With the scale s and the zero z of a group,
///
///     sum += s · (Σ x · (q + b) − (z + b) · Σ x)        b: what the conversion to T adds to an integer
template <class T, int kBits>
struct PackedWeights {
  static constexpr bool kIsPacked = true;
  static constexpr int kUnit = kStageRows;
  static constexpr int kOctetWords = kBits / 4;
  static constexpr int kWordRows = kSegment / kOctet * kOctetWords;
  static constexpr int kGroups = kSegment / kGroupTerms;  // of a stage, at least
  static constexpr int kWordBytes = kWordRows * kStageRows * 4;
  static constexpr int kScaleBytes = kGroups * kStageRows * static_cast<int>(sizeof(T));
  static constexpr int kStageBytes = kWordBytes + 2 * kScaleBytes;  // words, scales, zeros
  static constexpr int kCopiers = decoder::kCopiers;
  static constexpr int kArrivals = kCopiers;
  static constexpr float kAdded = kPackedAdded<T, kBits>;

  // The integers of an octet are converted in pairs (c, c + 4).
  __device__ static int position(int term) { return term < 4 ? 2 * term : 2 * term - 7; }

  __device__ static void copy(const Arguments<T>& a, const Job<T>& job, int group, int segment, int copier,
                              const Ring& ring) {
    const auto row = job.share.row(job.product, group * kStageRows);  // units are whole stages
    const Weight<T>& w = *row.weight;
    const int terms = min(kSegment, job.product.depth - segment * kSegment);
    const std::uint32_t stage = cuda::shared_address(ring.here());
    const auto* const words = static_cast<const std::uint32_t*>(w.data) +
                              static_cast<std::int64_t>(segment) * kWordRows * w.outputs + row.row;
    const int pieces = terms / kOctet * kOctetWords * 2;  // 16 bytes each
    for (int i = copier; i < pieces; i += kCopiers) {
      cuda::copy_async<16>(stage + i * 16, words + static_cast<std::int64_t>(i / 2) * w.outputs + i % 2 * 4);
    }
    if (copier < 2 * kGroups && copier % kGroups * kGroupTerms < terms) {
      const int at = (segment * kGroups + copier % kGroups) >> a.group_shift;
      const T* const from = (copier < kGroups ? w.scale : w.zero) + static_cast<std::int64_t>(at) * w.outputs + row.row;
      cuda::copy_async<16>(stage + kWordBytes + copier * kStageRows * static_cast<int>(sizeof(T)), from);
    }
    arrive_after_copies(ring.full + ring.stage);
  }

  // A lane's part of a slice: an octet of output g in each chunk.
  struct Fragment {
    std::uint32_t words[kSliceChunks][kOctetWords];
    float scales[kSliceGroups];
    float zeros[kSliceGroups];  // plus kAdded
  };

  __device__ static void load(Fragment& f, const char* stage, int warp, int lane, int terms) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(stage);
#pragma unroll
    for (int c = 0; c < kSliceChunks; ++c) {
#pragma unroll
      for (int w = 0; w < kOctetWords; ++w) {
        const int octet = (warp * kSlice + c * kChunk) / kOctet + lane % 4;
        f.words[c][w] = words[(octet * kOctetWords + w) * kStageRows + lane / 4];
      }
    }
    const T* const scales =
        reinterpret_cast<const T*>(stage + kWordBytes) + warp * kSliceGroups * kStageRows + lane / 4;
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

  __device__ static void multiply(const Fragment& even, const Fragment& odd, const Octet (&x)[kSliceChunks],
                                  const float* even_sums, const float* odd_sums, float (&result)[2]) {
    result[0] = result[1] = 0;
#pragma unroll
    for (int i = 0; i < kSliceGroups; ++i) {
      float sums[2][4] = {};
#pragma unroll
      for (int c = i * kGroupTerms / kChunk; c < (i + 1) * kGroupTerms / kChunk; ++c) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const std::uint32_t rows[4] = {
              packed_pair<T, kBits>(even.words[c], 2 * step), packed_pair<T, kBits>(odd.words[c], 2 * step),
              packed_pair<T, kBits>(even.words[c], 2 * step + 1), packed_pair<T, kBits>(odd.words[c], 2 * step + 1)};
          cuda::multiply_add_16_8_16<T>(sums[step], rows, x[c].pairs[2 * step], x[c].pairs[2 * step + 1]);
        }
      }
      result[0] += even.scales[i] * (sums[0][0] + sums[1][0] - even.zeros[i] * even_sums[i]);
      result[1] += odd.scales[i] * (sums[0][3] + sums[1][3] - odd.zeros[i] * odd_sums[i]);
    }
  }
};

/// The warps' sums of a batch of rows, which the finishers add. Two buffers, so that the consumers go on meanwhile.
struct Sums {
  float rows[2][kConsumerWarps][kBatchRows];
  float squares[2][kConsumerWarps];

  /// The consumers have written a batch's sums, and the finishers may read them: a named barrier of both. It also says
  /// when a buffer may be written again: the barrier of the batch between comes after the finishers have read it.
  __device__ static void meet(int buffer) { cuda::barrier_sync(2 + buffer, kConsumers + kFinishers); }
};

/// A consumer thread's view of the block.
template <class T>
struct Consumer {
  const Arguments<T>& a;
  Ring ring;
  T* x;           // [segment][warp][slice]
  float* x_sums;  // of groups
  Sums& sums;
  std::uint32_t tag;
  int buffer = 0;  // of sums

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static void synchronize() { cuda::barrier_sync(1, kConsumers); }

  /// The warp's slices of some segments of the product's input, weighted by the norm, to shared memory. Returns the
  /// lane's part of the sum of squares.
  template <class W, int kSegments>
  __device__ float receive(const Product<T>& p, int first_segment) {
    constexpr int kCount = kSegments * kPairs;
    const int begin = (first_segment * kSegment + warp() * kSlice) / 2 + lane();
    const auto pair = [begin](int i) { return begin + i / kPairs * (kSegment / 2) + i % kPairs * kWarp; };
    std::uint32_t pairs[kCount];
    std::uint32_t norms[kCount];
    bool has[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      has[i] = 2 * pair(i) < p.depth;
      norms[i] = p.norm != nullptr && has[i] ? __ldg(reinterpret_cast<const std::uint32_t*>(p.norm) + pair(i)) : 0;
    }
    if (p.in != nullptr) {
      const std::uint64_t* const in = p.in;
      await([&](int i) { return in + pair(i); }, has, tag, pairs);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        pairs[i] = has[i] ? reinterpret_cast<const std::uint32_t*>(a.x)[pair(i)] : 0;
      }
    }
    __syncwarp();
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (p.norm != nullptr) {
        const float2 value = unpack_pair<T>(pairs[i]);
        const float2 factor = unpack_pair<T>(norms[i]);
        squares += value.x * value.x + value.y * value.y;
        pairs[i] = pack_pair<T>(value.x * factor.x, value.y * factor.y);
      }
      if constexpr (!W::kIsPacked) {
        reinterpret_cast<std::uint32_t*>(x)[pair(i)] = pairs[i];
      } else {
        const float2 value = unpack_pair<T>(pairs[i]);
        const float of_group = cuda::sum_lanes<kWarp>(value.x + value.y);
        const int term = pair(i) * 2 % kOctet;
        T* const octet = x + pair(i) * 2 - term;
        const auto& pack = reinterpret_cast<const cuda::Pack<T, 2>&>(pairs[i]);
        octet[W::position(term)] = pack.at[0];
        octet[W::position(term + 1)] = pack.at[1];
        if (lane() == 0) {
          x_sums[pair(i) * 2 / kGroupTerms] = of_group;
        }
      }
    }
    return squares;
  }

  /// The same of all segments.
  template <class W>
  __device__ float receive(const Product<T>& p, int segments) {
    constexpr int kAtOnce = kSegmentsAtOnce;
    float squares = 0;
    if (segments == 1) {
      squares = receive<W, 1>(p, 0);
    } else {
#pragma unroll 1
      for (int first = 0; first < segments; first += kAtOnce) {
        squares += receive<W, kAtOnce>(p, first);
      }
    }
    __syncwarp();
    return squares;
  }

  template <class W>
  __device__ void next_stage(typename W::Fragment& fragment, int terms) {
    cuda::wait(ring.full + ring.stage, ring.parity);
    W::load(fragment, ring.here(), warp(), lane(), terms);
    __syncwarp();
    if (lane() == 0) {
      cuda::arrive(ring.empty + ring.stage);
    }
    ring.advance();
  }

  /// The block's part of a product, in batches of rows, and these in rounds of stages. In a round, two stages are
  /// multiplied at once: their rows are rows g and g + 8 of the tensor cores' first operand; columns 0 and 1 of the
  /// second are the x of the one and the other.
  template <class W>
  __device__ void multiply(const Job<T>& job) {
    const Product<T> p = job.product;
    const int groups = job.groups;
    const int segments = job.segments;
    const int depth = p.depth - warp() * kSlice;
    // A block without outputs has nothing to wait for.
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
          if (first + j < steps) {
            next_stage<W>(stages[j], depth - begins[j]);
          }
        }
        if (first == 0) {
          squares = done == 0 ? receive<W>(p, segments) : 0;
        }
        float parts[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j += 2) {
          const int begin = warp() * kSlice + (lane() / 4 % 2 == 0 ? begins[j] : begins[j + 1]);
          Octet octets[kSliceChunks];
#pragma unroll
          for (int chunk = 0; chunk < kSliceChunks; ++chunk) {
            octets[chunk] = load_octet(x + begin + lane() % 4 * kOctet + chunk * kChunk);
          }
          const float* const sums_of_slice = x_sums + warp() * kSliceGroups;
          W::multiply(stages[j], stages[j + 1], octets, sums_of_slice + begins[j] / kGroupTerms,
                      sums_of_slice + begins[j + 1] / kGroupTerms, reinterpret_cast<float(&)[2]>(parts[j]));
        }
        float(&of_warp)[kBatchRows] = sums.rows[buffer][warp()];
        if (segments == 1) {
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            if (lane() % 4 == 0) {
              of_warp[(first + j) * kStageRows + lane() / 4] = parts[j];
            }
          }
        } else {
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
      }
      squares = cuda::sum_lanes<kWarp>(squares);
      if (lane() == 0) {
        sums.squares[buffer][warp()] = squares;
      }
      sums.meet(buffer);
      buffer ^= 1;
    }
  }
};

/// A thread that adds the warps' sums of one row of each batch, and hands over the outputs.
template <class T>
struct Finisher {
  const Arguments<T>& a;
  Sums& sums;
  std::uint32_t tag;
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
      float squares = 0;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) {
        value += sums.rows[buffer][w][thread];
        squares += sums.squares[buffer][w];
      }
      buffer ^= 1;
      if (p.norm != nullptr) {
        inverse = done == 0 ? rsqrtf(squares / static_cast<float>(p.depth) + a.eps) : inverse;
        value *= inverse;
      }
      hand_over(p, row.output, has, value + bias);
    }
  }

  __device__ void hand_over(const Product<T>& p, int output, bool has, float value) {
    const float up = __shfl_xor_sync(cuda::kAllLanes, value, kStageRows);
    if (p.swiglu) {
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
        publish(p.out + output / 2, pair, tag);
      } else {
        reinterpret_cast<std::uint32_t*>(a.logits)[output / 2] = pair;
      }
    }
  }
};

}  // namespace mica::kernels::decoder
