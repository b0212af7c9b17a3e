#pragma once

// A row of scores from which a cluster samples a token: its slabs, its largest score, and sampling from all tokens.
// See sample_cuda.cu.

#include <cstdint>
#include <limits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/infer/kernels/detail/score_key.cuh>

namespace mica::kernels::sampling {

using cuda::kWarp;

constexpr int kBlocks = 8;  // per cluster
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBatch = 1024;
constexpr int kBins = 2048;
constexpr int kOwnBins = kBins / kBlocks;  // bins that a block adds up over all blocks
constexpr double kBinsOfUnit = 128;        // bins per difference of scores of one temperature
constexpr double kWeightUnits = std::int64_t{1} << 45;
constexpr int kDigits = 3;  // digits of a weight in a histogram; the sum of a digit of 2^15 weights fits into 32 bits
constexpr int kDigitBits = 15;

using Weight = unsigned long long;  // in units of 1 / kWeightUnits

template <class T>
struct Arguments {
  const T* logits;
  const bool* seen;        // or null
  const double* uniforms;  // null: take the largest
  std::int64_t* tokens;
  int columns;
  int slab;  // columns per block
  double temperature;
  double penalty;
  double top_p;
  int limit;     // k, or all columns
  bool ordered;  // whether weights are summed in the order of the scores
};

// A score and its token. Larger scores come first; of equal scores, smaller tokens.
struct Entry {
  double score;
  int token;

  __device__ bool before(const Entry& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

// Keys have the order of the scores, but scores that differ little may have the same key.
__device__ inline std::uint32_t key_of(double score) { return score_key(static_cast<float>(score)); }

// The inverse: the score as float32.
__device__ inline float score_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000) != 0 ? key & 0x7fffffff : ~key);
}

struct Histogram {
  int counts[kBins];
  unsigned digits[kDigits][kBins];  // the digits of the sums of weights
};

struct Sorted {
  Entry entries[kBatch];  // the block's; in block 0, those of all blocks, sorted
  double running[kBatch];
};

struct SharedMemory {
  Entry warp_entries[kWarps];
  double warp_sums[kWarps];
  int warp_counts[kWarps];
  Weight warp_weights[kWarps];
  Entry best;   // the best of the block, then of the row
  double sum;   // sum of the weights of the block
  int invalid;  // a score is NaN or +inf
  int count;    // number of entries
  union {
    Histogram histogram;
    Sorted sorted;
  };
  // The sums over all blocks, for the bins from rank * kOwnBins on.
  int bin_counts[kOwnBins];
  Weight bin_weights[kOwnBins];
  // The result of find_bin().
  int found_bin;
  int found_count;
  int count_above;
  Weight weight_above;
  // The result of a walk, which block 0 has found: the sum up to the token where the target is reached, or up to the
  // last one.
  double walk_sum;
  int walk_token;
  int walk_reached;
};

__device__ inline Entry entry_of_block(const Entry* e, int block) {
  return {cuda::load_from_block(&e->score, block), cuda::load_from_block(&e->token, block)};
}

template <class T>
struct Row {
  const Arguments<T>& a;
  SharedMemory& s;
  std::uint32_t* keys;  // the slab's, in shared memory; null: not needed
  int row;
  int rank;
  int begin;  // of the slab
  int size;
  double largest;

  __device__ double score(int column) const {
    const std::int64_t at = static_cast<std::int64_t>(row) * a.columns + column;
    const auto x = static_cast<double>(static_cast<float>(a.logits[at]));
    if (a.seen == nullptr || !a.seen[at]) {
      return x;
    }
    return x > 0 ? x / a.penalty : x * a.penalty;
  }
  __device__ double weight(double score) const { return exp((score - largest) / a.temperature); }

  // Fills the keys, and finds the first of the row's largest scores. Returns false if a score is NaN or +inf, or all
  // are -inf.
  __device__ bool find_largest() {
    Entry best{-INFINITY, std::numeric_limits<int>::max()};
    bool valid = true;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      const double x = score(begin + i);
      valid = valid && x < INFINITY;  // false for NaN
      const Entry entry{x, begin + i};
      if (entry.before(best)) {
        best = entry;
      }
      if (keys != nullptr) {
        keys[i] = key_of(x);
      }
    }
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    best = reduce(best);
    if (threadIdx.x % kWarp == 0) {
      s.warp_entries[warp] = best;
    }
    const bool invalid = __syncthreads_or(valid ? 0 : 1) != 0;
    if (warp == 0) {
      const int lane = static_cast<int>(threadIdx.x);
      best = reduce(s.warp_entries[lane % kWarps]);
      if (lane == 0) {
        s.best = best;
        s.invalid = invalid ? 1 : 0;
      }
    }
    cuda::meet_in_cluster();
    bool row_valid = true;
    best = entry_of_block(&s.best, 0);
    for (int block = 0; block < kBlocks; ++block) {
      const Entry other = entry_of_block(&s.best, block);
      best = other.before(best) ? other : best;
      row_valid = row_valid && cuda::load_from_block(&s.invalid, block) == 0;
    }
    cuda::meet_in_cluster();  // all blocks have read s.best and s.invalid
    if (threadIdx.x == 0) {
      s.best = best;
    }
    largest = best.score;
    __syncthreads();
    return row_valid && largest > -INFINITY;
  }

  __device__ static Entry reduce(Entry mine) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const Entry other{__shfl_xor_sync(cuda::kAllLanes, mine.score, step),
                        __shfl_xor_sync(cuda::kAllLanes, mine.token, step)};
      mine = other.before(mine) ? other : mine;
    }
    return mine;
  }

  // Returns the sum of `value` over the threads before this one. *total becomes the sum over the block.
  template <class S>
  __device__ S sum_before(S value, S* of_warps, S* total) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    S running = value;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const S other = __shfl_up_sync(cuda::kAllLanes, running, step);
      running += lane >= step ? other : S{0};
    }
    if (lane == kWarp - 1) {
      of_warps[warp] = running;
    }
    __syncthreads();
    S before = 0;
    S sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? of_warps[w] : S{0};
      sum += of_warps[w];
    }
    __syncthreads();
    *total = sum;
    return before + running - value;
  }

  // The thread's columns of the slab, which are adjacent: from *first to *last − 1.
  __device__ void own_columns(int* first, int* last) const {
    const int each = (size + kThreads - 1) / kThreads;
    *first = min(static_cast<int>(threadIdx.x) * each, size);
    *last = min(*first + each, size);
  }

  // Returns the sum of all weights. *before becomes the sum over the columns before this thread's, *mine the sum over
  // this thread's.
  __device__ double sum_weights(double* before, double* mine) {
    int first;
    int last;
    own_columns(&first, &last);
    *mine = 0;
    for (int i = first; i < last; ++i) {
      *mine += weight(score(begin + i));
    }
    double of_block;
    *before = sum_before(*mine, s.warp_sums, &of_block);
    if (threadIdx.x == 0) {
      s.sum = of_block;
    }
    cuda::meet_in_cluster();
    double total = 0;
    for (int block = 0; block < kBlocks; ++block) {
      const double sum = cuda::load_from_block(&s.sum, block);
      *before += block < rank ? sum : 0;
      total += sum;
    }
    cuda::meet_in_cluster();
    return total;
  }

  // Samples from all tokens, in their order.
  __device__ void sample_from_all(double uniform) {
    double before;
    double mine;
    const double total = sum_weights(&before, &mine);
    const double target = uniform * total;
    // Finds the thread in whose columns the sum reaches the target. Its number is the count of the threads for which
    // the sum stays below.
    const int below = __syncthreads_count(before + mine < target ? 1 : 0);
    if (threadIdx.x == 0) {
      s.count = below;
    }
    cuda::meet_in_cluster();
    int owner = 0;
    for (int block = 0; block < kBlocks; ++block) {
      owner += cuda::load_from_block(&s.count, block);
    }
    const bool is_last = rank == kBlocks - 1 && threadIdx.x == kThreads - 1;
    if (owner == rank * kThreads + static_cast<int>(threadIdx.x) || (owner == kBlocks * kThreads && is_last)) {
      int first;
      int last;
      own_columns(&first, &last);
      double running = before;
      int column = first;
      for (int i = first; i < last && (i == first || running < target); ++i) {
        running += weight(score(begin + i));
        column = i;
      }
      a.tokens[row] = min(begin + column, a.columns - 1);
    }
  }
};

}  // namespace mica::kernels::sampling
