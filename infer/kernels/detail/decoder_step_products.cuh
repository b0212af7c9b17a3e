#pragma once

// The decoder step's products: the threads that multiply and those that add. See decoder_step_sm90.cu.

#include <cstdint>
#include <type_traits>

#include <mica/infer/kernels/detail/decoder_step_ends.cuh>
#include <mica/infer/kernels/detail/decoder_step_weights.cuh>
#include <mica/infer/kernels/detail/silu.cuh>
#include <mica/ops/decode_attention/detail/running_softmax.cuh>

namespace mica::kernels::decoder {

/// The warps' sums of a batch of rows, which the finishers add up. There are two buffers, so that the consumers can
/// continue meanwhile.
struct Sums {
  float rows[2][kConsumerWarps][kBatchRows];
  alignas(16) float squares[2][kConsumerWarps];  // only for a product's first batch
  __device__ static void synchronize(int buffer) {
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
  const StepInput<T>& input;
  T* x;           // [segment][warp][slice]
  float* x_sums;  // sums of x over groups of kGroupTerms terms
  Sums& sums;
  int step_words;     // offset of this step's words
  const int& splits;  // of attention
  int buffer = 0;     // of sums

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static void synchronize() { cuda::barrier_sync(1, kConsumers); }

  /// Writes a lane's four elements of x, from term `at` on, to shared memory.
  template <class W>
  __device__ void store_x(int at, std::uint32_t first, std::uint32_t second) {
    const bool is_odd = lane() % 2 != 0;
    if constexpr (W::kIsPacked) {
      const float2 values = unpack_pair<T>(first);
      const float2 others = unpack_pair<T>(second);
      float sum = values.x + values.y + (others.x + others.y);
      // The integers of an octet are converted in pairs (c, c + 4), so x needs the same pairs. Two lanes share an
      // octet.
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

  /// Waits for the warp's slices of kSegments segments of the product's input, multiplies them by the norm's weight,
  /// and writes them to shared memory. Returns the lane's part of the sum of squares.
  template <class W, int kSegments>
  __device__ float receive_segments(const Product<T>& p, int first_segment) {
    const int begin = first_segment * kSegment + warp() * kSlice + lane() * kQuad;
    const bool has_norm = p.norm != nullptr;
    WordsOf<2> pairs[kSegments];
    uint2 norms[kSegments];
    bool has[kSegments];
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
      const int at = begin + i * kSegment;
      has[i] = at < p.depth;
      norms[i] = has_norm && has[i] ? __ldg(reinterpret_cast<const uint2*>(p.norm + at)) : uint2{};
    }
    if (p.in != nullptr) {
      constexpr int step = kSegment / 2 * static_cast<int>(kWordSpread);
      const std::uint32_t* const in = p.in + step_words + word_offset(begin / 2);
      await([in](int i) { return in + i * step; }, has, pairs);
    } else {
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        const uint2 own = has[i] ? input.read(begin + i * kSegment) : uint2{};
        pairs[i] = {own.x, own.y};
      }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
      auto& [first, second] = pairs[i].at;
      if (has_norm) {
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

  /// The same for the warp's slice of one segment of attention's result, if attention was split. Merges the parts.
  template <class W, int kAtOnce>
  __device__ void receive_parts(const Product<T>& p, int segment) {
    const int at = segment * kSegment + warp() * kSlice + lane() * kQuad;
    const int head = a.head_width == 64 ? at / 64 : at / 128;
    const std::uint32_t* const parts = p.parts + step_words + head * (kMostSplits - 1) * a.head_width + at;
    const std::uint32_t* const stats = p.stats + step_words + head * kMostSplits * 2;
    const bool is_there = at < p.depth;
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
        has[i] = is_there && first + i < splits;
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
    const float factor = is_there ? __fdividef(1, sum) : 0;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      total[j] *= factor;
    }
    store_x<W>(at, pack_pair<T>(total[0], total[1]), pack_pair<T>(total[2], total[3]));
  }

  /// The same for all segments of the product's input.
  template <class W, bool kMayBeParts>
  __device__ float receive(const Product<T>& p, int segments) {
    constexpr int kAtOnce = kSegmentsAtOnce;
    float squares = 0;
    if (kMayBeParts && p.parts != nullptr && splits > 1) {
#pragma unroll 1
      for (int segment = 0; segment < segments; ++segment) {
        if (splits == 2) {
          receive_parts<W, 2>(p, segment);
        } else {
          receive_parts<W, kSplitsAtOnce>(p, segment);
        }
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

  /// Loads `count` groups of rows from stages of up to kStageGroups groups, and releases the stages.
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
      cuda::arrive(ring.empty + (stage < ring.stages ? stage : stage - ring.stages));
    }
    ring.skip(stages);
  }

  __device__ void put_squares(const Product<T>& p, bool is_first, float squares) {
    if (is_first && p.norm != nullptr) {
      squares = cuda::sum_lanes<kWarp>(squares);
      if (lane() == 0) {
        sums.squares[buffer][warp()] = squares;
      }
    }
  }

  /// Computes the block's part of a product: batches of rows, and in each batch, rounds of groups that the warp holds
  /// in registers. A block without outputs waits for nothing.
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

  /// Multiplies kCount groups by x and writes the warp's sums and, if kCount > 1, its sum of squares of x.
  template <class W, int kCount>
  __device__ void put(const typename W::Fragment* from, const LaneX& of_lane, const float (&of_groups)[kSliceGroups],
                      float squares, float* to) {
    float parts[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      parts[j] = W::multiply(from[j], of_lane, of_groups);
    }
    // The sum over the lanes is computed while the tensor cores still multiply.
    const float of_warp = kCount > 1 ? cuda::sum_lanes<kWarp>(squares) : 0;
    if (lane() % 4 == 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        to[j * kStageRows] = parts[j];
      }
    }
    if (kCount > 1 && lane() == 0) {
      sums.squares[buffer][warp()] = of_warp;
    }
  }

  /// For x of one segment, of which a lane keeps its part in registers. kExtra: the number of groups beyond kAhead that
  /// the warp holds while it waits for x.
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
      // Multiplies the groups from `group` on, several of them interleaved, since each product of a group waits for the
      // group's previous one. Sums of groups that the batch does not have may be written, too; nothing reads them.
      const auto put_groups = [&]<int kCount>(int group, const Fragment(&from)[kCount]) {
        const int remaining = count - group;
        if (kCount > 1 && remaining > kCount / 2) {
          put<W, kCount>(from, of_lane, of_groups, squares, to + group * kStageRows);
        } else if (kCount > 2 && remaining == 2) {
          put<W, 2>(from, of_lane, of_groups, squares, to + group * kStageRows);
        } else {
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            if (j < remaining) {
              put<W, 1>(from + j, of_lane, of_groups, squares, to + (group + j) * kStageRows);
            }
          }
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
        put_groups(first, fragments);
        first += kAhead;
        if (has_extra) {
          put_groups(first, extra);
          first += kExtra;
        }
      } while (first < count);
      if (count < 2) {
        put_squares(p, done == 0, squares);
      }
      sums.synchronize(buffer);
      buffer ^= 1;
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
        int begins[kAhead];  // the first terms of the stages' segments
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
      put_squares(p, done == 0, squares);
      sums.synchronize(buffer);
      buffer ^= 1;
    }
  }
};

/// A thread that adds up the warps' sums of one row of each batch, and writes the outputs.
template <class T>
struct Finisher {
  const Arguments<T>& a;
  Sums& sums;
  int thread;
  int step_words;
  int buffer = 0;
  float residual = 0;   // for this thread's row of o_proj and down_proj
  Candidate largest{};  // of this thread's logits

  /// Reads the residual of this thread's row from the step's x.
  __device__ void read_residual(const StepInput<T>& input, const OutputSplit<T>& split) {
    if (thread < split.outputs) {
      residual = input.at(split.first + thread);
    }
  }

  __device__ void finish(const Job<T>& job) {
    const Product<T> p = job.product;
    const float per_term = 1.0f / static_cast<float>(p.depth);
    float inverse = 1;
    for (int done = 0; done < job.groups; done += kBatchGroups) {
      const auto row = job.split.row(p, done * kStageRows + thread);
      const bool has = row.weight != nullptr;
      auto* const to = p.out != nullptr ? p.out + step_words + word_offset(row.output / 2)
                                        : reinterpret_cast<std::uint32_t*>(a.logits) + row.output / 2;
      const float bias = has && row.weight->bias != nullptr ? static_cast<float>(row.weight->bias[row.row]) : 0;
      sums.synchronize(buffer);
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
          inverse = rsqrtf(squares * per_term + a.eps);
        }
        value *= inverse;
      }
      buffer ^= 1;
      publish_output(p, to, row.output, has, value + bias);
    }
  }

  __device__ void publish_output(const Product<T>& p, std::uint32_t* to, int output, bool has, float value) {
    if (p.swiglu) {
      const float up = __shfl_xor_sync(cuda::kAllLanes, value, kStageRows);
      value = fast_silu(value) * up;
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
        publish(to, pair);
      } else {
        *to = pair;
      }
    }
    if (p.out == nullptr && has) {
      largest.add(static_cast<float>(static_cast<T>(value)), output);
    }
  }
};

}  // namespace mica::kernels::decoder
