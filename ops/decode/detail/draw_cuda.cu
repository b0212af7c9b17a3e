// Draws a token for each row of logits. A row belongs to a cluster of 8 blocks, each of which holds a slice of it in
// shared memory.
//
//     largest score --> temperature 0: its token
//          |
//     weights exp((score - largest) / temperature)
//          |
//          +--> all tokens:      sums in the order of the tokens, up to uniform * total
//          |
//          +--> top-k, top-p:    batches of the largest scores, sorted, summed in that order up to a part of the total
//
// A batch is found by histograms of the scores' bits, from the highest: as many of the largest scores below the last
// batch as fit into kBatch. It holds all that are needed for a usual k or p, so that one batch is sorted. Equal scores
// that are too many for a batch have one weight and need no order but that of the tokens.
//
// Counts are integers, and sums have an order that depends on the row alone.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode/detail/draw_kernels.h>

namespace mica::kernels {

namespace {

using cuda::kWarp;

constexpr int kBlocks = 8;  // of a cluster
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBatch = 1024;
constexpr int kBins = 2048;
constexpr int kDigits = 3;  // of a key: 11, 11 and 10 bits

template <class T>
struct Arguments {
  const T* logits;
  const bool* seen;        // or null
  const double* uniforms;  // null: take the largest
  std::int64_t* tokens;
  int columns;
  int slice;  // columns of a block
  double temperature;
  double penalty;
  double top_p;
  int limit;     // k, or all columns
  bool ordered;  // by score
};

// A score and its token. The larger score is first, then the smaller token.
struct Entry {
  double score;
  int token;

  __device__ bool before(const Entry& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

__device__ int shift_of(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }

// The order of float32 as one of unsigned integers; the order of scores, but that neighbors may become equal.
__device__ std::uint32_t key_of(double score) {
  const auto narrow = static_cast<float>(score);
  const std::uint32_t bits = narrow == 0 ? 0 : __float_as_uint(narrow);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

struct Shared {
  Entry warp_entries[kWarps];
  double warp_sums[kWarps];
  int warp_counts[kWarps];
  Entry best;   // of the block, then of the row
  double sum;   // of the block
  int invalid;  // a score is NaN or +inf
  int histogram[kBins];
  int found_bin;
  int found_above;
  int found_count;
  int count;              // of entries
  Entry entries[kBatch];  // of the block; in block 0 of all blocks, in order
  double running[kBatch];
  // What block 0 has found: the sum up to the token, or to the last one.
  double walk_sum;
  int walk_token;
  int walk_ends;
};

// A batch of scores: those whose keys are in [from, below), or `ties` with one key.
struct Batch {
  std::uint64_t from;
  std::uint64_t below;
  int count;
  bool ties;
};

__device__ void meet() {
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
}

__device__ Entry entry_of_block(const Entry* e, int block) {
  return {cuda::load_from_block(&e->score, block), cuda::load_from_block(&e->token, block)};
}

template <class T>
struct Row {
  const Arguments<T>& a;
  Shared& s;
  std::uint32_t* keys;  // of the slice, in shared memory
  int row;
  int rank;
  int begin;  // of the slice
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

  // Fills the keys and finds the row's first largest score. False if the row is not finite.
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
    meet();
    bool row_valid = true;
    best = entry_of_block(&s.best, 0);
    for (int block = 0; block < kBlocks; ++block) {
      const Entry other = entry_of_block(&s.best, block);
      best = other.before(best) ? other : best;
      row_valid = row_valid && cuda::load_from_block(&s.invalid, block) == 0;
    }
    meet();  // all have read
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

  // The sum of `value` over the threads before this one; *total is the block's.
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

  // A thread's neighboring columns of the slice.
  __device__ void own_columns(int* first, int* last) const {
    const int each = (size + kThreads - 1) / kThreads;
    *first = min(static_cast<int>(threadIdx.x) * each, size);
    *last = min(*first + each, size);
  }

  // The sum of all weights; `before`: of the columns before this thread's.
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
    meet();
    double total = 0;
    for (int block = 0; block < kBlocks; ++block) {
      const double sum = cuda::load_from_block(&s.sum, block);
      *before += block < rank ? sum : 0;
      total += sum;
    }
    meet();
    return total;
  }

  // Draws among all tokens, in their order.
  __device__ void draw_from_all(double uniform) {
    double before;
    double mine;
    const double total = sum_weights(&before, &mine);
    const double target = uniform * total;
    // The thread whose columns' sums reach the target: so many come before it.
    const int below = __syncthreads_count(before + mine < target ? 1 : 0);
    if (threadIdx.x == 0) {
      s.count = below;
    }
    meet();
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

  // The histogram of one digit of the cluster's keys in [from, below); from the highest bin on, as many bins as have at
  // most `room` keys: found_bin is the next one, found_above the keys in those, found_count the keys in it.
  __device__ void find_bin(std::uint64_t from, std::uint64_t below, int digit, int room) {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) {
      s.histogram[i] = 0;
    }
    __syncthreads();
    const int shift = shift_of(digit);
    const std::uint32_t mask = digit == kDigits - 1 ? 1023 : 2047;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      const std::uint32_t key = keys[i];
      if (key >= from && key < below) {
        atomicAdd(&s.histogram[(key >> shift) & mask], 1);
      }
    }
    meet();
    // A thread has neighboring bins, the first thread the highest.
    constexpr int kEach = kBins / kThreads;
    int counts[kEach];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int bin = kBins - 1 - (static_cast<int>(threadIdx.x) * kEach + i);
      counts[i] = 0;
      for (int block = 0; block < kBlocks; ++block) {
        counts[i] += cuda::load_from_block(&s.histogram[bin], block);
      }
      mine += counts[i];
    }
    int all;
    int above = sum_before(mine, s.warp_counts, &all);
    if (threadIdx.x == 0) {
      s.found_bin = -1;  // all fit
      s.found_above = all;
      s.found_count = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (above <= room && above + counts[i] > room) {
        s.found_bin = kBins - 1 - (static_cast<int>(threadIdx.x) * kEach + i);
        s.found_above = above;
        s.found_count = counts[i];
      }
      above += counts[i];
    }
    meet();  // all have read the histograms
  }

  // The next largest scores.
  __device__ Batch next_batch(std::uint64_t below) {
    std::uint64_t from = 0;
    std::uint64_t bin_end = below;
    int count = 0;
    for (int digit = 0; digit < kDigits; ++digit) {
      find_bin(from, bin_end, digit, kBatch - count);
      count += s.found_above;
      if (s.found_bin < 0) {
        return {from, below, count, false};
      }
      const std::uint64_t bin = from + (static_cast<std::uint64_t>(s.found_bin) << shift_of(digit));
      const std::uint64_t end = bin + (std::uint64_t{1} << shift_of(digit));
      if (count >= kBatch / 4) {
        return {end, below, count, false};
      }
      from = bin;
      bin_end = min(bin_end, end);
    }
    // Here a bin is one key.
    if (count > 0) {
      return {from + 1, below, count, false};
    }
    return {from, from + 1, s.found_count, true};
  }

  // Collects a batch in block 0, in order, with the running sums of its weights after `sum`.
  __device__ void collect(const Batch& batch, double sum) {
    if (threadIdx.x == 0) {
      s.count = 0;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      if (keys[i] >= batch.from && keys[i] < batch.below) {
        s.entries[atomicAdd(&s.count, 1)] = {score(begin + i), begin + i};
      }
    }
    meet();
    if (rank == 0) {
      int filled = s.count;
      for (int block = 1; block < kBlocks; ++block) {
        const int count = cuda::load_from_block(&s.count, block);
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
          s.entries[filled + i] = entry_of_block(&s.entries[i], block);
        }
        filled += count;
      }
      for (int i = filled + static_cast<int>(threadIdx.x); i < kBatch; i += kThreads) {
        s.entries[i] = {-INFINITY, std::numeric_limits<int>::max()};
      }
      __syncthreads();
      sort();
      constexpr int kEach = kBatch / kThreads;
      double weights[kEach];
      double mine = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = static_cast<int>(threadIdx.x) * kEach + i;
        weights[i] = at < filled ? weight(s.entries[at].score) : 0;
        mine += weights[i];
      }
      double all;
      double running = sum + sum_before(mine, s.warp_sums, &all);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        running += weights[i];
        s.running[static_cast<int>(threadIdx.x) * kEach + i] = running;
      }
      __syncthreads();
    }
  }

  // A bitonic sort of block 0's entries.
  __device__ void sort() {
    for (int width = 2; width <= kBatch; width *= 2) {
      for (int step = width / 2; step > 0; step /= 2) {
        const int i = static_cast<int>(threadIdx.x) / step * 2 * step + static_cast<int>(threadIdx.x) % step;
        const bool forward = (i & width) == 0;
        const Entry low = s.entries[i];
        const Entry high = s.entries[i + step];
        if (high.before(low) == forward) {
          s.entries[i] = high;
          s.entries[i + step] = low;
        }
        __syncthreads();
      }
    }
  }

  // The n-th token, from 0, whose key is that of a batch of ties. By one warp of block 0; slow, and rare.
  __device__ int tie(std::uint64_t key, int n) const {
    const int lane = static_cast<int>(threadIdx.x);
    for (int first = 0; first < a.columns; first += kWarp) {
      const int column = first + lane;
      const bool is_one = column < a.columns && key_of(score(column)) == key;
      const unsigned found = __ballot_sync(cuda::kAllLanes, is_one);
      if (n < __popc(found)) {
        return first + static_cast<int>(__fns(found, 0, n + 1));
      }
      n -= __popc(found);
    }
    return a.columns - 1;
  }

  // The order of scores, as far as it is known.
  struct Walk {
    Batch batch;  // the first, whose entries block 0 has
    bool has_first;
  };

  // Goes along the scores in their order, up to `limit` of them, until the running sum is at least `target`: the sum,
  // and the token where it is reached, or the last. All threads of the cluster call it.
  __device__ double walk(double target, Walk& known, int* token) {
    std::uint64_t below = std::uint64_t{1} << 32;
    int done = 0;
    double sum = 0;
    while (true) {
      const bool first = done == 0;
      Batch batch;
      if (first && known.has_first) {
        batch = known.batch;
      } else {
        batch = next_batch(below);
        if (!batch.ties) {
          collect(batch, sum);
        }
        known = {batch, first && !batch.ties};
      }
      const int count = min(batch.count, a.limit - done);
      const bool last = done + count >= a.limit || done + count >= a.columns;
      if (rank == 0) {
        if (batch.ties) {
          walk_ties(batch, count, sum, target, last);
        } else {
          walk_entries(count, target, last);
        }
      }
      meet();
      sum = cuda::load_from_block(&s.walk_sum, 0);
      *token = cuda::load_from_block(&s.walk_token, 0);
      const bool ends = cuda::load_from_block(&s.walk_ends, 0) != 0;
      meet();
      if (ends) {
        return sum;
      }
      done += count;
      below = batch.from;
    }
  }

  __device__ void walk_entries(int count, double target, bool last) {
    // The first entry whose running sum is at least the target; running sums do not fall.
    constexpr int kEach = kBatch / kThreads;
    int below_target = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) * kEach + i;
      below_target += at < count && s.running[at] < target ? 1 : 0;
    }
    int found;
    sum_before(below_target, s.warp_counts, &found);
    if (threadIdx.x == 0) {
      const int at = min(found, count - 1);
      s.walk_sum = s.running[at];
      s.walk_token = s.entries[at].token;
      s.walk_ends = last || found < count ? 1 : 0;
    }
    __syncthreads();
  }

  __device__ void walk_ties(const Batch& batch, int count, double sum, double target, bool last) {
    if (threadIdx.x < kWarp) {
      const double each = weight(score(tie(batch.from, 0)));
      const double needed = ceil((target - sum) / each);
      const int taken = needed >= count ? count : max(static_cast<int>(needed), 1);
      const int token = tie(batch.from, taken - 1);
      if (threadIdx.x == 0) {
        s.walk_sum = sum + taken * each;
        s.walk_token = token;
        s.walk_ends = last || s.walk_sum >= target ? 1 : 0;
      }
    }
    __syncthreads();
  }

  // Draws among the largest scores.
  __device__ void draw_from_largest(double uniform) {
    Walk known{{}, false};
    int token;
    double total;
    if (a.limit < a.columns) {
      total = walk(INFINITY, known, &token);
    } else {
      double before;
      double mine;
      total = sum_weights(&before, &mine);
    }
    const double kept = a.top_p < 1 ? walk(a.top_p * total, known, &token) : total;
    walk(uniform * kept, known, &token);
    if (rank == 0 && threadIdx.x == 0) {
      a.tokens[row] = token;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) draw_tokens_kernel(const __grid_constant__ Arguments<T> a) {
  extern __shared__ std::uint32_t slice_keys[];
  __shared__ Shared shared;
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const int rank = static_cast<int>(blockIdx.x);
  const int begin = min(rank * a.slice, a.columns);
  Row<T> row{.a = a,
             .s = shared,
             .keys = a.ordered ? slice_keys : nullptr,
             .row = static_cast<int>(blockIdx.y),
             .rank = rank,
             .begin = begin,
             .size = min(begin + a.slice, a.columns) - begin,
             .largest = 0};
  const bool finite = row.find_largest();
  if (!finite || a.uniforms == nullptr) {
    if (rank == 0 && threadIdx.x == 0) {
      a.tokens[row.row] = finite ? shared.best.token : -1;
    }
  } else if (a.ordered) {
    row.draw_from_largest(a.uniforms[row.row]);
  } else {
    row.draw_from_all(a.uniforms[row.row]);
  }
  meet();  // others may still read this block's shared memory
}

}  // namespace

bool can_draw_tokens(Cuda) { return cuda::device_has_clusters(); }

void draw_tokens(Cuda, const DrawTokens& args) {
  on_dtype(Types<float, Half, BFloat16>{}, args.logits.dtype(), "draw_tokens", [&]<class T>() {
    const DrawOptions& o = args.options;
    const auto columns = static_cast<int>(args.logits.size(1));
    const bool draws = args.uniforms.defined();
    const Arguments<T> a{.logits = args.logits.data<T>(),
                         .seen = args.seen.data_or_null<bool>(),
                         .uniforms = args.uniforms.data_or_null<double>(),
                         .tokens = args.tokens.data<std::int64_t>(),
                         .columns = columns,
                         .slice = (columns + kBlocks - 1) / kBlocks,
                         .temperature = o.temperature,
                         .penalty = o.repetition_penalty,
                         .top_p = o.top_p,
                         .limit = o.top_k == 0 ? columns : static_cast<int>(std::min<std::int64_t>(o.top_k, columns)),
                         .ordered = draws && ((o.top_k > 0 && o.top_k < columns) || o.top_p < 1)};
    const std::size_t shared = a.ordered ? sizeof(std::uint32_t) * static_cast<std::size_t>(a.slice) : 0;
    cuda::check(cudaFuncSetAttribute(draw_tokens_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(sizeof(std::uint32_t) * kMostDrawColumns / kBlocks)),
                "cudaFuncSetAttribute");
    cuda::Launch(dim3(kBlocks, static_cast<unsigned>(args.logits.size(0))), kThreads, shared)
        .cluster(dim3(kBlocks))
        .dependent()
        .run(draw_tokens_kernel<T>, "draw_tokens_kernel", a);
  });
}

}  // namespace mica::kernels
