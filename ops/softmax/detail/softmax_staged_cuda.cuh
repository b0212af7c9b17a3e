#pragma once

// Softmax of rows that a thread block, or a cluster of blocks, keeps in shared memory: long rows, and those that are
// not aligned. A block
//
//     1. copies its slab of the row to shared memory,
//     2. finds the slab's largest element, reading aligned units of 16 bytes,
//     3. adds up powers, element by element from the row's beginning, so that the order of the sum does not depend on
//        the row's alignment; then all blocks of the row combine their maxima and sums,
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
/// of 16 bytes, so that aligned units of 16 bytes can be copied as a whole. The row's ends, before the first unit and
/// after the last one, are copied element by element.
template <class T>
class StagedPiece {
 public:
  static constexpr int kUnit = 16 / sizeof(T);

  __device__ StagedPiece(unsigned char* memory, const T* from, int count) {
    const int phase = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16 / sizeof(T));
    image_ = reinterpret_cast<T*>(memory) + phase;
    head_ = min(count, phase == 0 ? 0 : kUnit - phase);
    units_ = (count - head_) / kUnit;
    ends_ = count - units_ * kUnit;
  }

  /// Bytes of shared memory for a piece of `count` elements.
  __host__ __device__ static constexpr int bytes(int count) { return ((count + 2 * kUnit - 1) / kUnit) * 16; }

  __device__ T* image() const { return image_; }

  /// Starts the copies from global memory. The kernel reads `elements` elements. Call cuda::wait_copies() and
  /// __syncthreads() before reading the image.
  __device__ void fetch(const T* from, std::int64_t elements) const {
    const std::uint64_t policy = cuda::read_once_policy(elements * static_cast<int>(sizeof(T)));
    for_units([&](int i) { cuda::copy_async<16>(cuda::shared_address(image_ + i), from + i, policy); });
    for_ends([&](int i) { image_[i] = from[i]; });
    cuda::commit_copies();
  }

  /// Calls f(i) for the index i of the first element of each of the thread's units.
  template <int kAtOnce = 4, class F>
  __device__ void for_units(const F& f) const {
    for_steps<kAtOnce>(head_ + static_cast<int>(threadIdx.x) * kUnit, head_ + units_ * kUnit,
                       static_cast<int>(blockDim.x) * kUnit, f);
  }
  /// Calls f(i) for each element i of the ends that is the thread's. The ends have fewer elements than there are
  /// threads.
  template <class F>
  __device__ void for_ends(const F& f) const {
    const int e = static_cast<int>(threadIdx.x);
    if (e < ends_) {
      f(e < head_ ? e : e + units_ * kUnit);
    }
  }
  /// Calls f(i) for each of the thread's elements, counted from the row's beginning.
  template <class F>
  __device__ void for_elements(const F& f) const {
    for_steps<4>(static_cast<int>(threadIdx.x), units_ * kUnit + ends_, static_cast<int>(blockDim.x), f);
  }

 private:
  T* image_;
  int head_;   // elements before the first unit
  int units_;  // number of units
  int ends_;   // elements before and after the units
};

constexpr int kStagedThreads = held::kMostTeamThreads;  // the most threads of a block
template <class T>
constexpr int kStagedBlocks = sizeof(T) == 8 ? 1 : 3;  // per multiprocessor

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
  piece.for_ends([&](int i) { largest = larger(largest, rule.counted(static_cast<S>(piece.image()[i]), true)); });
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
  piece.for_elements(
      [&](int i) { found.sum += found.power(rule.counted(static_cast<S>(image[i]), true) - found.largest); });
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
  piece.for_ends([&](int i) { to[i] = static_cast<T>(result(static_cast<S>(image[i]))); });
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
  piece.for_elements([&](int i) { found.sum += Rule::term(static_cast<S>(out[i]), static_cast<S>(gradient[i])); });
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
  piece.for_ends(
      [&](int i) { to[i] = static_cast<T>(rule.gradient(static_cast<S>(out[i]), static_cast<S>(gradient[i]), sum)); });
  for (int c = seen + static_cast<int>(threadIdx.x); c < at.columns; c += static_cast<int>(blockDim.x)) {
    to[c] = static_cast<T>(S{0});
  }
}

}  // namespace mica::kernels::softmax_rows
