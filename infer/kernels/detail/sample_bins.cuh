#pragma once

// Divides the scores of a row into bins, and finds the bin in which the sum over the largest scores reaches a target.
// See sample_cuda.cu.

#include <mica/infer/kernels/detail/sample_row.cuh>

namespace mica::kernels::sampling {

// How keys are divided into bins. Bin 0 has the largest scores.
struct Bins {
  // The first bins of a row divide scores by their difference from the largest one. All later bins divide the keys from
  // `first` to `end` − 1, with 2^shift keys per bin.
  bool by_score = true;
  std::uint64_t first = 0;
  std::uint64_t end = std::uint64_t{1} << 32;
  int shift = 0;
};

template <class T>
struct BinnedRow : Row<T> {
  using Row<T>::a;
  using Row<T>::begin;
  using Row<T>::keys;
  using Row<T>::largest;
  using Row<T>::rank;
  using Row<T>::s;
  using Row<T>::score;
  using Row<T>::size;
  using Row<T>::sum_before;
  using Row<T>::weight;

  __device__ int bin_of(const Bins& bins, std::uint32_t key) const {
    if (bins.by_score) {
      // Rounding does not change the order.
      const double difference = fmax(largest - static_cast<double>(score_of(key)), 0.0);
      return static_cast<int>(fmin(difference * fmin(kBinsOfUnit / a.temperature, 1e300), kBins - 1.0));
    }
    return static_cast<int>((bins.end - 1 - key) >> bins.shift);
  }
  __device__ static bool contains(const Bins& bins, std::uint32_t key) { return key >= bins.first && key < bins.end; }

  // Counts the cluster's keys in each bin, and adds up their weights.
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
    // The last bin may have most of the keys, and atomic additions to it would wait for each other. So each thread
    // first adds up its own keys of this bin.
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
        // The highest digit may be 2^15, since the largest weight is 1.
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
    cuda::meet_in_cluster();
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
    cuda::meet_in_cluster();
  }

  __device__ static double sum_of(Weight units) { return static_cast<double>(units) / kWeightUnits; }

  __device__ bool reaches(int count, Weight units, double target) const {
    return count >= a.limit || sum_of(units) >= target;
  }

  // Finds the first bin with which the sum reaches the target, or the count reaches the limit. `count` and `units` are
  // the count and the sum of what precedes the bins.
  __device__ void find_bin(int count, Weight units, double target) {
    // A thread has adjacent bins, which one block has added up.
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

  // Divides a bin into smaller bins. If the bin is one of the first bins, its smallest and largest keys are found by
  // bisection.
  __device__ Bins divide(const Bins& bins, int bin) const {
    Bins result{.by_score = false};
    if (bins.by_score) {
      const auto first_key_up_to = [&](int last_bin) {  // the smallest key in the bins up to last_bin
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
};

}  // namespace mica::kernels::sampling
