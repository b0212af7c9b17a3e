// Draws a token for each row of logits. A row belongs to a cluster of 8 blocks, each of which holds a slice of it in
// shared memory.
//
//     largest score --> temperature 0: its token
//          |
//     weights exp((score - largest) / temperature)
//          |
//          +--> all tokens:      sums in the order of the tokens, up to uniform * total
//          |
//          +--> top-k, top-p:    sums in the order of the scores, up to a part of the total:
//
//     bin 0    bin 1    bin 2 ...       of scores, from the largest on, with the number and the sum of its weights
//     |      |        |  *     |        the bin where the sum is reached
//                     | .. * . |        its scores, sorted, and summed one by one
//
// If everything up to that bin fits into a batch of kBatch scores, the batch starts with the largest score and usually
// serves all sums of a row. If the bin itself is too large, it is divided into bins of its own, down to equal scores,
// which have one weight and need no order but that of the tokens.
//
// Counts are integers, and so are the weights of bins, in units of 2^-45: their sums do not depend on an order. Other
// sums have an order that depends on the row alone.

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
constexpr int kOwnBins = kBins / kBlocks;  // a block adds up those of all blocks
constexpr double kBinsOfUnit = 128;        // bins of a difference of scores of one temperature
constexpr double kWeightUnits = std::int64_t{1} << 45;
constexpr int kDigits = 3;  // of a weight, in a histogram: sums of 2^15 weights fit into 32 bits
constexpr int kDigitBits = 15;

using Weight = unsigned long long;  // in units of 1 / kWeightUnits

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

// The order of float32 as one of unsigned integers; the order of scores, but that neighbors may become equal.
__device__ std::uint32_t key_of(double score) {
  const auto narrow = static_cast<float>(score);
  const std::uint32_t bits = narrow == 0 ? 0 : __float_as_uint(narrow);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

// The inverse, of a key's float32.
__device__ float score_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000) != 0 ? key & 0x7fffffff : ~key);
}

struct Histogram {
  int counts[kBins];
  unsigned digits[kDigits][kBins];  // of the sums of weights
};

struct Sorted {
  Entry entries[kBatch];  // of the block; in block 0 of all blocks, in order
  double running[kBatch];
};

struct Shared {
  Entry warp_entries[kWarps];
  double warp_sums[kWarps];
  int warp_counts[kWarps];
  Weight warp_weights[kWarps];
  Entry best;   // of the block, then of the row
  double sum;   // of the block
  int invalid;  // a score is NaN or +inf
  int count;    // of entries
  union {
    Histogram histogram;
    Sorted sorted;
  };
  // Of all blocks, the bins from rank * kOwnBins on.
  int bin_counts[kOwnBins];
  Weight bin_weights[kOwnBins];
  // The bin that was looked for.
  int found_bin;
  int found_count;
  int count_above;
  Weight weight_above;
  // What block 0 has found: the sum up to the token, or to the last one.
  double walk_sum;
  int walk_token;
  int walk_reached;
};

// How keys are divided into bins, of which bin 0 has the largest scores.
struct Bins {
  // The first bins: by the score's difference to the largest one. Others: keys from `first` on, 2^shift a bin.
  bool by_score = true;
  std::uint64_t first = 0;
  std::uint64_t end = std::uint64_t{1} << 32;
  int shift = 0;
};

// Some scores in a row, of which block 0 has the entries unless they are equal.
struct Batch {
  int count = 0;
  int before = 0;     // scores before it
  double sum = 0;     // of the weights before it
  bool ties = false;  // all have one key
  std::uint32_t key = 0;
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

  __device__ int bin_of(const Bins& bins, std::uint32_t key) const {
    if (bins.by_score) {
      // Rounding does not change the order.
      const double difference = fmax(largest - static_cast<double>(score_of(key)), 0.0);
      return static_cast<int>(fmin(difference * fmin(kBinsOfUnit / a.temperature, 1e300), kBins - 1.0));
    }
    return static_cast<int>((bins.end - 1 - key) >> bins.shift);
  }
  __device__ static bool contains(const Bins& bins, std::uint32_t key) { return key >= bins.first && key < bins.end; }

  // Counts the cluster's keys and adds up their weights for each bin.
  __device__ void fill(const Bins& bins) {
    Histogram& h = s.histogram;
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) {
      h.counts[i] = 0;
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit) {
        h.digits[digit][i] = 0;
      }
    }
    __syncthreads();
    // The last bin may have most of the keys, which would wait for each other.
    int last_count = 0;
    unsigned last_digits[kDigits] = {};
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      const std::uint32_t key = keys[i];
      if (!contains(bins, key)) {
        continue;
      }
      const int bin = bin_of(bins, key);
      const auto units = static_cast<Weight>(weight(score(begin + i)) * kWeightUnits + 0.5);
      if (bin == kBins - 1) {
        ++last_count;
      } else {
        atomicAdd(&h.counts[bin], 1);
      }
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit) {
        // The highest digit may be 2^15: the largest weight is 1.
        const Weight rest = units >> (kDigitBits * digit);
        const auto part = static_cast<unsigned>(digit + 1 < kDigits ? rest & ((1 << kDigitBits) - 1) : rest);
        if (bin == kBins - 1) {
          last_digits[digit] += part;
        } else if (part != 0) {
          atomicAdd(&h.digits[digit][bin], part);
        }
      }
    }
    last_count = __reduce_add_sync(cuda::kAllLanes, last_count);
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      last_digits[digit] = __reduce_add_sync(cuda::kAllLanes, last_digits[digit]);
    }
    if (threadIdx.x % kWarp == 0 && last_count > 0) {
      atomicAdd(&h.counts[kBins - 1], last_count);
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit) {
        atomicAdd(&h.digits[digit][kBins - 1], last_digits[digit]);
      }
    }
    meet();
    for (int i = static_cast<int>(threadIdx.x); i < kOwnBins; i += kThreads) {
      const int bin = rank * kOwnBins + i;
      int count = 0;
      Weight units = 0;
      for (int block = 0; block < kBlocks; ++block) {
        count += cuda::load_from_block(&h.counts[bin], block);
#pragma unroll
        for (int digit = 0; digit < kDigits; ++digit) {
          const int part = cuda::load_from_block(reinterpret_cast<const int*>(&h.digits[digit][bin]), block);
          units += static_cast<Weight>(static_cast<unsigned>(part)) << (kDigitBits * digit);
        }
      }
      s.bin_counts[i] = count;
      s.bin_weights[i] = units;
    }
    meet();
  }

  __device__ static double sum_of(Weight units) { return static_cast<double>(units) / kWeightUnits; }

  __device__ bool reaches(int count, Weight units, double target) const {
    return count >= a.limit || sum_of(units) >= target;
  }

  // The first bin with which the sum reaches the target or the count the limit, given those before the bins.
  __device__ void find_bin(int count, Weight units, double target) {
    // A thread has neighboring bins, of one block.
    constexpr int kEach = kBins / kThreads;
    const int first = static_cast<int>(threadIdx.x) * kEach;
    const int owner = first / kOwnBins;
    int counts[kEach];
    Weight weights[kEach];
    int my_count = 0;
    Weight my_weight = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      counts[i] = cuda::load_from_block(&s.bin_counts[first % kOwnBins + i], owner);
      weights[i] = weight_from_block(&s.bin_weights[first % kOwnBins + i], owner);
      my_count += counts[i];
      my_weight += weights[i];
    }
    int all_counts;
    Weight all_weights;
    count += sum_before(my_count, s.warp_counts, &all_counts);
    units += sum_before(my_weight, s.warp_weights, &all_weights);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!reaches(count, units, target) && reaches(count + counts[i], units + weights[i], target)) {
        s.found_bin = first + i;
        s.found_count = counts[i];
        s.count_above = count;
        s.weight_above = units;
      }
      count += counts[i];
      units += weights[i];
    }
    __syncthreads();
  }

  __device__ static Weight weight_from_block(const Weight* units, int block) {
    const int* const words = reinterpret_cast<const int*>(units);
    const auto low = static_cast<unsigned>(cuda::load_from_block(words, block));
    const auto high = static_cast<unsigned>(cuda::load_from_block(words + 1, block));
    return static_cast<Weight>(high) << 32 | low;
  }

  // The keys of a bin by score, as bins of their own: its ends by bisection.
  __device__ Bins divide(const Bins& bins, int bin) const {
    Bins result{.by_score = false};
    if (bins.by_score) {
      const auto first_key_up_to = [&](int last_bin) {  // the smallest key in a bin up to that
        std::uint64_t low = key_of(-INFINITY);
        std::uint64_t high = std::uint64_t{1} << 32;
        while (low < high) {
          const std::uint64_t middle = (low + high) / 2;
          if (bin_of(bins, static_cast<std::uint32_t>(middle)) <= last_bin) {
            high = middle;
          } else {
            low = middle + 1;
          }
        }
        return low;
      };
      result.first = first_key_up_to(bin);
      result.end = bin == 0 ? std::uint64_t{1} << 32 : first_key_up_to(bin - 1);
    } else {
      result.end = bins.end - (static_cast<std::uint64_t>(bin) << bins.shift);
      const std::uint64_t size_of_bin = std::uint64_t{1} << bins.shift;
      result.first = result.end - bins.first > size_of_bin ? result.end - size_of_bin : bins.first;
    }
    while (((result.end - 1 - result.first) >> result.shift) >= kBins) {
      ++result.shift;
    }
    return result;
  }

  // Finds the batch in which the running sum reaches the target. `has_first_bins`: those of all scores are filled.
  __device__ Batch find_batch(double target, bool* has_first_bins) {
    Bins bins;
    int count = 0;
    Weight units = 0;
    if (!*has_first_bins) {
      fill(bins);
    }
    while (true) {
      *has_first_bins = bins.by_score;
      find_bin(count, units, target);
      const int bin = s.found_bin;
      const int in_bin = s.found_count;
      const bool from_largest = bins.by_score && s.count_above + in_bin <= kBatch;
      if (!from_largest) {
        count = s.count_above;
        units = s.weight_above;
      }
      meet();  // all have read what was found, and the bins
      Batch batch{.count = in_bin, .before = count, .sum = sum_of(units)};
      if (from_largest) {
        batch.count = s.count_above + in_bin;
        collect(batch, [&](std::uint32_t key) { return bin_of(bins, key) <= bin; });
        return batch;
      }
      if (in_bin <= kBatch) {
        collect(batch, [&](std::uint32_t key) { return contains(bins, key) && bin_of(bins, key) == bin; });
        return batch;
      }
      if (!bins.by_score && bins.shift == 0) {
        batch.ties = true;
        batch.key = static_cast<std::uint32_t>(bins.end - 1 - bin);
        return batch;
      }
      bins = divide(bins, bin);
      fill(bins);
    }
  }

  // Collects the scores of a batch in block 0, in order, with the running sums of their weights. The other blocks'
  // entries must stay until block 0 has got them.
  template <class F>
  __device__ void collect(const Batch& batch, const F& contained) {
    Sorted& sorted = s.sorted;
    if (threadIdx.x == 0) {
      s.count = 0;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      if (contained(keys[i])) {
        sorted.entries[atomicAdd(&s.count, 1)] = {score(begin + i), begin + i};
      }
    }
    meet();
    if (rank == 0) {
      int filled = s.count;
      for (int block = 1; block < kBlocks; ++block) {
        const int count = cuda::load_from_block(&s.count, block);
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
          sorted.entries[filled + i] = entry_of_block(&sorted.entries[i], block);
        }
        filled += count;
      }
      for (int i = filled + static_cast<int>(threadIdx.x); i < kBatch; i += kThreads) {
        sorted.entries[i] = {-INFINITY, std::numeric_limits<int>::max()};
      }
      __syncthreads();
      sort(filled);
      constexpr int kEach = kBatch / kThreads;
      double weights[kEach];
      double mine = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = static_cast<int>(threadIdx.x) * kEach + i;
        weights[i] = at < filled ? weight(sorted.entries[at].score) : 0;
        mine += weights[i];
      }
      double all;
      double running = batch.sum + sum_before(mine, s.warp_sums, &all);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        running += weights[i];
        sorted.running[static_cast<int>(threadIdx.x) * kEach + i] = running;
      }
      __syncthreads();
    }
  }

  // A bitonic sort of block 0's entries, of which the first `filled` need an order.
  __device__ void sort(int filled) {
    int all = 2;
    while (all < filled) {
      all *= 2;
    }
    for (int width = 2; width <= all; width *= 2) {
      for (int step = width / 2; step > 0; step /= 2) {
        const int i = static_cast<int>(threadIdx.x) / step * 2 * step + static_cast<int>(threadIdx.x) % step;
        const bool forward = (i & width) == 0;
        if (i < all) {
          const Entry low = s.sorted.entries[i];
          const Entry high = s.sorted.entries[i + step];
          if (high.before(low) == forward) {
            s.sorted.entries[i] = high;
            s.sorted.entries[i + step] = low;
          }
        }
        __syncthreads();
      }
    }
  }

  // The n-th token, from 0, whose key is that of a batch of ties. By one warp of block 0; slow, and rare.
  __device__ int tie(std::uint32_t key, int n) const {
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

  // What is known of the order of the scores.
  struct Known {
    bool has_first_bins = false;
    Batch batch;
  };

  // Goes along the scores in their order, up to `limit` of them, until the running sum is at least `target`: the sum,
  // and the token where it is reached, or the last. All threads of the cluster call it.
  __device__ double walk(double target, Known& known, int* token) {
    bool starts_known = known.batch.count > 0 && known.batch.before == 0 && !known.batch.ties;
    while (true) {
      if (!starts_known) {
        known.batch = find_batch(target, &known.has_first_bins);
      }
      if (rank == 0) {
        if (known.batch.ties) {
          walk_ties(known.batch, target);
        } else {
          walk_entries(known.batch, target);
        }
      }
      meet();
      const double sum = cuda::load_from_block(&s.walk_sum, 0);
      *token = cuda::load_from_block(&s.walk_token, 0);
      const bool reached = cuda::load_from_block(&s.walk_reached, 0) != 0;
      meet();
      if (reached || !starts_known) {
        return sum;
      }
      starts_known = false;
    }
  }

  __device__ void walk_entries(const Batch& batch, double target) {
    // The first entry whose running sum is at least the target; running sums do not fall.
    constexpr int kEach = kBatch / kThreads;
    const int count = min(batch.count, a.limit - batch.before);
    int below_target = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) * kEach + i;
      below_target += at < count && s.sorted.running[at] < target ? 1 : 0;
    }
    int found;
    sum_before(below_target, s.warp_counts, &found);
    if (threadIdx.x == 0) {
      const int at = min(found, count - 1);
      s.walk_sum = s.sorted.running[at];
      s.walk_token = s.sorted.entries[at].token;
      s.walk_reached = found < count || batch.before + count >= a.limit ? 1 : 0;
    }
    __syncthreads();
  }

  __device__ void walk_ties(const Batch& batch, double target) {
    if (threadIdx.x < kWarp) {
      const int count = min(batch.count, a.limit - batch.before);
      const double each = weight(score(tie(batch.key, 0)));
      const double needed = ceil((target - batch.sum) / each);
      const int taken = needed >= count ? count : max(static_cast<int>(needed), 1);
      const int token = tie(batch.key, taken - 1);
      if (threadIdx.x == 0) {
        s.walk_sum = batch.sum + taken * each;
        s.walk_token = token;
        s.walk_reached = 1;
      }
    }
    __syncthreads();
  }

  // Draws among the largest scores.
  __device__ void draw_from_largest(double uniform) {
    Known known;
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
    cuda::Launch(dim3(kBlocks, static_cast<unsigned>(args.logits.size(0))), kThreads, shared)
        .cluster(dim3(kBlocks))
        .dependent()
        .run(draw_tokens_kernel<T>, "draw_tokens_kernel", a);
  });
}

}  // namespace mica::kernels
