#pragma once

// Sorts the scores of a row, as far as sampling with top-k and top-p needs it. See sample_cuda.cu.

#include <mica/infer/kernels/detail/sample_bins.cuh>

namespace mica::kernels::sampling {

// Some scores that follow each other in the sorted order. Block 0 has their entries, unless all of them are equal.
struct Batch {
  int count = 0;
  int before = 0;     // scores before it
  double sum = 0;     // of the weights before it
  bool ties = false;  // all have one key
  std::uint32_t key = 0;
};

template <class T>
struct RankedRow : BinnedRow<T> {
  using Base = BinnedRow<T>;
  using Base::a;
  using Base::begin;
  using Base::bin_of;
  using Base::contains;
  using Base::divide;
  using Base::fill;
  using Base::find_bin;
  using Base::keys;
  using Base::rank;
  using Base::row;
  using Base::s;
  using Base::score;
  using Base::size;
  using Base::sum_before;
  using Base::sum_of;
  using Base::sum_weights;
  using Base::weight;

  // Finds the batch in which the running sum reaches the target. *has_first_bins tells whether the histogram has the
  // first bins, those of all scores; updates it.
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
      cuda::meet_in_cluster();  // all blocks have read the found bin, and the bins
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

  // Collects the scores of a batch in block 0, sorted, with the running sums of their weights. The other blocks must
  // not overwrite their entries until block 0 has read them.
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
    cuda::meet_in_cluster();
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

  // Sorts the first `filled` of block 0's entries (bitonic sort).
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

  // The n-th token, counted from 0, that has this key. Called by one warp of block 0, which is slow, but batches of
  // ties are rare.
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

  // What earlier walks have found out about the order of the scores.
  struct Known {
    bool has_first_bins = false;
    Batch batch;
  };

  // Walks along the sorted scores, at most `limit` of them, until the running sum is at least `target`. Returns the
  // sum; *token becomes the token where the target is reached, or else the last one. All threads of the cluster call
  // it.
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
      cuda::meet_in_cluster();
      const double sum = cuda::load_from_block(&s.walk_sum, 0);
      *token = cuda::load_from_block(&s.walk_token, 0);
      const bool reached = cuda::load_from_block(&s.walk_reached, 0) != 0;
      cuda::meet_in_cluster();
      if (reached || !starts_known) {
        return sum;
      }
      starts_known = false;
    }
  }

  __device__ void walk_entries(const Batch& batch, double target) {
    // Finds the first entry whose running sum is at least the target. Running sums do not decrease, so it counts those
    // below the target.
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

  // Samples from the tokens of the largest scores.
  __device__ void sample_from_largest(double uniform) {
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

}  // namespace mica::kernels::sampling
