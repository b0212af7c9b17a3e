#pragma once

// Softmax of rows that a thread block, or a cluster of blocks, keeps in shared memory: long rows, and those that are
// not aligned. A block
//
//     1. copies its slab of the row to shared memory,
//     2. finds the slab's largest element, reading aligned units of 16 bytes,
//     3. adds up powers, reading pairs of elements that are counted from the row's beginning, so that the order of the
//        sum does not depend on the row's alignment; then all blocks of the row combine their maxima and sums,
//     4. computes the results, again by units of 16 bytes, and writes them to global memory.

#include <limits>

#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::RowPlan;
using rows::Pack;

/// Calls f(i) for i = first, first + step, … < end, unrolled by kAtOnce so that several loads can be in flight.
template <int kAtOnce, class F>
__device__ void for_steps(int first, int end, int step, const F& f) {
  int i = first;
  for (; i < end - (kAtOnce - 1) * step; i += kAtOnce * step) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      f(i + k * step);
    }
  }
#pragma unroll 1
  for (; i < end; i += step) {
    f(i);
  }
}

/// A piece of global memory and its copy in shared memory, called image. Both begin at the same offset from a multiple
/// of 16 bytes, so that aligned units of 16 bytes can be copied as a whole. The elements before the first unit and
/// after the last one, called edges, are copied one by one.
template <class T>
class StagedPiece {
 public:
  static constexpr int kUnit = 16 / sizeof(T);

  __device__ StagedPiece(unsigned char* memory, const T* from, int count) {
    const int phase = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16 / sizeof(T));
    image_ = reinterpret_cast<T*>(memory) + phase;
    head_ = min(count, phase == 0 ? 0 : kUnit - phase);
    units_ = (count - head_) / kUnit;
    edges_ = count - units_ * kUnit;
  }

  /// Bytes of shared memory for a piece of `count` elements.
  __host__ __device__ static constexpr int bytes(int count) { return ((count + 2 * kUnit - 1) / kUnit) * 16; }

  __device__ T* image() const { return image_; }

  /// Starts the copies from global memory. The kernel reads `elements` elements. Call cuda::wait_copies() and
  /// __syncthreads() before reading the image.
  __device__ void fetch(const T* from, std::int64_t elements) const {
    const std::uint64_t policy = cuda::read_once_policy(elements * static_cast<int>(sizeof(T)));
    for_units([&](int i) { cuda::copy_async<16>(cuda::shared_address(image_ + i), from + i, policy); });
    for_edges([&](int i) { image_[i] = from[i]; });
    cuda::commit_copies();
  }

  /// Copies the image to global memory; `to` has the same offset from a multiple of 16 bytes. Call __syncthreads()
  /// before it.
  __device__ void write(T* to) const {
    for_units([&](int i) { rows::store(to + i, rows::load<kUnit>(image_ + i)); });
    for_edges([&](int i) { to[i] = image_[i]; });
  }

  /// Calls f(i) for the index i of the first element of each of the thread's units.
  template <int kAtOnce = 4, class F>
  __device__ void for_units(const F& f) const {
    for_steps<kAtOnce>(head_ + thread() * kUnit, head_ + units_ * kUnit,
                       static_cast<int>(blockDim.x * blockDim.y) * kUnit, f);
  }
  /// Calls f(i) for the index i of the thread's edge element, if it has one. There are fewer edge elements than
  /// threads.
  template <class F>
  __device__ void for_edges(const F& f) const {
    const int e = thread();
    if (e < edges_) {
      f(e < head_ ? e : e + units_ * kUnit);
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

  T* image_;
  int head_;   // elements before the first unit
  int units_;  // number of units
  int edges_;  // elements before and after the units
};

/// How many elements a 32-bit word of shared memory holds; 1 for wider elements.
template <class T>
constexpr int kInWord = sizeof(T) == 2 ? 2 : 1;

/// Reads a row in shared memory by pairs of 16-bit elements, columns 2 i and 2 i + 1. If the row begins in the middle
/// of a 32-bit word, a pair is assembled from two words. The second element of the last pair may be past the row's end.
/// Wider elements are read one by one.
template <class T>
class RowWords {
 public:
  __device__ explicit RowWords(const T* row) {
    if constexpr (kInWord<T> == 2) {
      in_middle_ = cuda::shared_address(row) % 4 != 0;
      row_ = row - (in_middle_ ? 1 : 0);
    } else {
      row_ = row;
    }
  }

  __device__ bool in_middle() const { return in_middle_; }

  /// The pair that begins at an even `column`. kMaybe: whether the row may begin in the middle of a word.
  template <bool kMaybe>
  __device__ Pack<T, kInWord<T>> at(int column) const {
    if constexpr (kInWord<T> == 1 || !kMaybe) {
      return rows::load<kInWord<T>>(row_ + column);
    } else {
      const unsigned* const word = reinterpret_cast<const unsigned*>(row_ + column);
      const unsigned both = __funnelshift_r(word[0], word[1], in_middle_ ? 16 : 0);
      return reinterpret_cast<const Pack<T, 2>&>(both);
    }
  }

 private:
  const T* row_;
  bool in_middle_ = false;
};

constexpr int kStagedThreads = held::kMostTeamThreads;  // the most threads of a block
template <class T>
constexpr int kStagedBlocks = sizeof(T) == 8 ? 1 : 3;  // per multiprocessor

/// The elements of a RowWords pair, converted to the type of their sums.
template <class T>
struct WordValues {
  Accumulate<T> at[kInWord<T>];
};
template <class T>
__device__ WordValues<T> unpacked(const Pack<T, kInWord<T>>& word) {
  WordValues<T> values;
  rows::unpack(word, values.at);
  return values;
}

/// Reads one or more rows of `columns` columns in shared memory by pairs (RowWords). Calls f(values of each row…) for
/// each of the thread's pairs and, if the number of columns is odd, single(c) for the last column c in one thread. The
/// rows must have the same offset from a multiple of 4 bytes.
template <class T, class F, class Single, class... Row>
__device__ void for_words(int columns, const F& f, const Single& single, const Row*... row) {
  const int whole = columns / kInWord<T> * kInWord<T>;
  const int step = static_cast<int>(blockDim.x) * kInWord<T>;
  const int first = static_cast<int>(threadIdx.x) * kInWord<T>;
  const auto all = [&]<bool kMaybe>(const RowWords<Row>&... words) {
    for_steps<4>(first, whole, step, [&](int c) {
      const auto with = [&](const Pack<Row, kInWord<Row>>&... packs) { f(unpacked<Row>(packs)...); };
      with(words.template at<kMaybe>(c)...);
    });
  };
  if ((RowWords<Row>(row).in_middle() || ...)) {
    all.template operator()<true>(RowWords<Row>(row)...);
  } else {
    all.template operator()<false>(RowWords<Row>(row)...);
  }
  if (whole < columns && whole % step == first) {
    single(whole);
  }
}

/// The largest element of a slab in shared memory, in all threads of the block.
template <class T, class Rule>
__device__ Accumulate<T> largest_in_block(const StagedPiece<T>& piece, const Rule& rule) {
  using S = Accumulate<T>;
  constexpr int kUnit = StagedPiece<T>::kUnit;
  __shared__ S warps[kStagedThreads / rows::kWarp];
  S largest = std::numeric_limits<S>::lowest();
  piece.for_units([&](int i) {
    S values[kUnit];
    rows::unpack(rows::load<kUnit>(piece.image() + i), values);
#pragma unroll
    for (const S value : values) {
      largest = larger(largest, rule.counted(value, true));
    }
  });
  piece.for_edges([&](int i) { largest = larger(largest, rule.counted(static_cast<S>(piece.image()[i]), true)); });
  largest = largest_of_lanes(largest, rows::kWarp);
  const int lane = static_cast<int>(threadIdx.x) % rows::kWarp;
  if (lane == 0) {
    warps[threadIdx.x / rows::kWarp] = largest;
  }
  __syncthreads();
  const int count = static_cast<int>(blockDim.x) / rows::kWarp;
  return largest_of_lanes(lane < count ? warps[lane] : warps[0], rows::kWarp);
}

template <class T, Team kTeam, class Rule>
__global__ void __launch_bounds__(kStagedThreads, kStagedBlocks<T>)
    softmax_staged(const T* x, T* y, std::int64_t rows, std::int64_t columns, Rule rule, RowPlan plan) {
  using S = Accumulate<T>;
  using Found = SumExp<S, typename Rule::Power>;
  constexpr int kUnit = StagedPiece<T>::kUnit;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename held::Exchange<Found, kTeam>::Shared shared;

  held::Exchange<Found, kTeam> exchange(shared, plan.cluster);
  const Place<kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  const StagedPiece<T> piece(memory, x + first, seen);
  piece.fetch(x + first, rows * columns);
  cuda::wait_copies<0>();
  __syncthreads();

  const T* const image = piece.image();
  auto found = Found::nothing();
  found.largest = largest_in_block(piece, rule);
  for_words<T>(
      seen,
      [&](const WordValues<T>& word) {
#pragma unroll
        for (const S value : word.at) {
          found.sum += found.power(rule.counted(value, true) - found.largest);
        }
      },
      [&](int c) { found.sum += found.power(rule.counted(static_cast<S>(image[c]), true) - found.largest); }, image);
  found = exchange.joined(found, at.rank);

  const S factor = rule.factor(found.sum);
  T* const to = y + first;
  const auto result = [&](S value) { return rule.result(value, found.largest, factor); };
  piece.for_units([&](int i) {
    S values[kUnit];
    rows::unpack(rows::load<kUnit>(image + i), values);
#pragma unroll
    for (S& value : values) {
      value = result(value);
    }
    rows::store(to + i, rows::pack_of<T>(values));
  });
  piece.for_edges([&](int i) { to[i] = static_cast<T>(result(static_cast<S>(image[i]))); });
  for (int c = seen + static_cast<int>(threadIdx.x); c < at.columns; c += static_cast<int>(blockDim.x)) {
    to[c] = static_cast<T>(S{0});
  }
}

template <class T, Team kTeam, class Rule>
__global__ void __launch_bounds__(kStagedThreads, kStagedBlocks<T>)
    softmax_backward_staged(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns, Rule rule,
                            RowPlan plan) {
  using S = Accumulate<T>;
  using Found = PlainSum<S>;
  constexpr int kUnit = StagedPiece<T>::kUnit;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename held::Exchange<Found, kTeam>::Shared shared;

  held::Exchange<Found, kTeam> exchange(shared, plan.cluster);
  const Place<kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  const StagedPiece<T> piece(memory, y + first, seen);
  const StagedPiece<T> dy_piece(memory + StagedPiece<T>::bytes(plan.slab), dy + first, seen);
  piece.fetch(y + first, 2 * rows * columns);
  dy_piece.fetch(dy + first, 2 * rows * columns);
  cuda::wait_copies<0>();
  __syncthreads();

  const T* const out = piece.image();
  const T* const gradient = dy_piece.image();
  auto found = Found::nothing();
  for_words<T>(
      seen,
      [&](const WordValues<T>& outs, const WordValues<T>& gradients) {
#pragma unroll
        for (int j = 0; j < kInWord<T>; ++j) {
          found.sum += Rule::term(outs.at[j], gradients.at[j]);
        }
      },
      [&](int c) { found.sum += Rule::term(static_cast<S>(out[c]), static_cast<S>(gradient[c])); }, out, gradient);
  const S sum = exchange.joined(found, at.rank).sum;

  T* const to = dx + first;
  piece.template for_units<2>([&](int i) {
    S outs[kUnit];
    S gradients[kUnit];
    rows::unpack(rows::load<kUnit>(out + i), outs);
    rows::unpack(rows::load<kUnit>(gradient + i), gradients);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      gradients[j] = rule.gradient(outs[j], gradients[j], sum);
    }
    rows::store(to + i, rows::pack_of<T>(gradients));
  });
  piece.for_edges(
      [&](int i) { to[i] = static_cast<T>(rule.gradient(static_cast<S>(out[i]), static_cast<S>(gradient[i]), sum)); });
  for (int c = seen + static_cast<int>(threadIdx.x); c < at.columns; c += static_cast<int>(blockDim.x)) {
    to[c] = static_cast<T>(S{0});
  }
}

}  // namespace mica::kernels::softmax_rows
