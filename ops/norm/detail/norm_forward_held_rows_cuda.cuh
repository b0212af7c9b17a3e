#pragma once

// What a thread holds in the kernel for held rows: its packs of the row, and the elements from which the row's shift is
// computed.

#include <algorithm>
#include <type_traits>

#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_held_shape_cuda.cuh>

namespace mica::kernels::norm_cuda {

// A thread's packs of a row, with zeros in place of absent packs, and the first elements of the row, from which its
// shift is computed. All computations use the differences of elements from the shift. 16-bit elements stay packed in
// registers, so that more threads fit on a multiprocessor.
template <class H>
class RowPacks {
  using N = typename H::N;
  using T = typename H::T;
  using S = typename H::S;
  static constexpr int V = H::V;
  static constexpr int P = H::P;

 public:
  /// `row` is where the row's first pack begins. If there is no such row, nothing is loaded. is_last: it is the last
  /// row of the matrix.
  __device__ void load_from(const T* row, const Place<H>& place, std::uint64_t policy, bool present, bool is_last) {
    // With edges, whole packs are loaded, but nothing past the end of the matrix.
    const int left = present ? place.columns - place.first - (H::kEdges && is_last ? V - 1 : 0) : 0;
    load_packs(opaque(row + place.first), left, policy, packs_);
    if constexpr (H::kEdges) {
      if (is_last) {
        load_cut_pack(row + place.first, place);
      }
    }
    if constexpr (N::kCentered && !H::kAdds && !H::kEdges) {
      if (present) {
        load_first(row);
      }
    }
  }

  /// With edges, the shift is computed from the row's second pack, which is never an edge. Each warp copies that of its
  /// next row to `to`, in shared memory, and takes it from there when it computes the row. After a load into registers,
  /// the compiler would wait at once, to spill the pack or to move it to uniform registers.
  __device__ static void copy_first(Pack<T, V>& to, const T* row) {
    if (threadIdx.x % kWarp == 0) {
      cuda::copy_async<16>(&to, row + V);
      cuda::commit_copies();
    }
  }
  __device__ void take_first(const Pack<T, V>& from) {
    cuda::wait_copies<0>();
    __syncwarp();
    first_.set(0, load<kFirst<T, V>>(from.at));
    __syncwarp();  // before the next copy
  }

  /// Replaces the packs by those of the sum, and writes them. `begin` is the index of the row's first element.
  __device__ void add(const Addends<T>& a, std::int64_t begin, const Place<H>& place, std::uint64_t policy) {
    Packs residuals;
    load_packs(a.residual + begin + place.first, place.columns - place.first, policy, residuals);
    [[maybe_unused]] const PhiloxKey key = N::kSource == Source::dropped_sum ? absolute_key(a.key) : PhiloxKey{};
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.has(i)) {
        const int column = place.first + i * H::kStep;
        S x[V];
        S sum[V];
        unpack(packs_.pack(i), x);
        unpack(residuals.pack(i), sum);
        if (a.x_bias != nullptr) {
          S bias[V];
          unpack(load<V>(a.x_bias + column), bias);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            x[j] += bias[j];
          }
        }
        if constexpr (N::kSource == Source::dropped_sum) {
          drop_pack(x, begin + column, key, a.threshold, a.scale);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sum[j] += x[j];
        }
        const Pack<T, V> pack = pack_of<T>(sum);
        store(a.sum + begin + column, pack);
        packs_.set(i, pack);
      }
    }
  }

  /// Gets the first elements of a row of sums from the team's first thread.
  __device__ void share_first() {
    using First = Pack<T, kFirst<T, V>>;
    const Pack<T, V>& mine = packs_.pack(0);
    First first;
    if constexpr (H::kTeam == Team::block) {
      __shared__ First shared;
      if (threadIdx.x == 0) {
        shared = reinterpret_cast<const First&>(mine);
      }
      __syncthreads();
      first = shared;
    } else {
      constexpr int kWords = sizeof(First) / 4;
      static_assert(kWords * 4 == sizeof(First));
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const unsigned word = reinterpret_cast<const unsigned*>(&mine)[i];
        reinterpret_cast<unsigned*>(&first)[i] = __shfl_sync(kAllLanes, word, 0, H::kLanes);
      }
    }
    first_.set(0, first);
  }

  /// Computes the shift from the first elements of the row. Call it once: packs in the type of sums are replaced by
  /// their differences from the shift.
  __device__ S find_shift(const Place<H>& place) {
    shift_ = 0;
    if constexpr (N::kCentered) {
      shift_ = shift_of(first_.pack(0));
    }
    if constexpr (H::kEdges) {
      const T shift = static_cast<T>(shift_);
      shift_ = static_cast<S>(shift);
      if (place.edges) {
        fill_edges(place, shift);
      }
    }
    if constexpr (!N::kCentered) {
      return 0;
    }
    if constexpr (kInPlace) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const S from = place.has(i) ? shift_ : S(0);
        Pack<T, V> pack = packs_.pack(i);
#pragma unroll
        for (T& x : pack.at) {
          x -= from;
        }
        packs_.set(i, pack);
      }
    }
    return shift_;
  }

  /// Returns the differences of pack i from the shift; zeros if the pack is absent.
  __device__ void differences(int i, const Place<H>& place, S (&values)[V]) const {
    unpack(packs_.pack(i), values);
    if constexpr (N::kCentered && !kInPlace) {
      const S from = place.has(i) ? shift_ : S(0);
#pragma unroll
      for (S& value : values) {
        value -= from;
      }
    }
  }

  /// Sets the elements of the edges that are not in the row to `value`, so that they contribute nothing to a sum.
  __device__ void fill_edges(const Place<H>& place, T value) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.may_be_edge(i) && place.has(i) && place.is_edge(i)) {
        Pack<T, V> pack = packs_.pack(i);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          pack.at[j] = j < place.first_of(i) || j >= place.end_of(i) ? value : pack.at[j];
        }
        packs_.set(i, pack);
      }
    }
  }

  /// Makes the compiler believe that the packs may have changed. Otherwise it would keep the differences that it has
  /// computed, and spill registers.
  __device__ void forget() { packs_.forget(); }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, S>;
  using Packs = held::HeldPacks<T, V, P, /*kPacked=*/true>;

  // Loads the packs that begin in the next `left` columns, with a policy for the L2 cache.
  __device__ static void load_packs(const T* from, int left, [[maybe_unused]] std::uint64_t policy, Packs& packs) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      packs.set(i, {});
      if (i * H::kStep < left) {
        if constexpr (sizeof(Pack<T, V>) != 8) {
          packs.set(i, load_streaming<V>(from + i * H::kStep, policy));
        } else {
          packs.set(i, load_streaming<V>(from + i * H::kStep));
        }
      }
    }
  }

  __device__ void load_first(const T* from) {
    constexpr int kLoad = std::min(V, kFirst<T, V>);
    Pack<T, kFirst<T, V>> first;
#pragma unroll
    for (int i = 0; i < kFirst<T, V>; i += kLoad) {
      reinterpret_cast<Pack<T, kLoad>&>(first.at[i]) = load<kLoad>(from + i);
    }
    first_.set(0, first);
  }

  // Loads the elements of the pack inside which the matrix ends.
  __device__ void load_cut_pack(const T* from, const Place<H>& place) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.has(i) && place.end_of(i) < V) {
        Pack<T, V> part = {};
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (j < place.end_of(i)) {
            part.at[j] = from[i * H::kStep + j];
          }
        }
        packs_.set(i, part);
      }
    }
  }

  Packs packs_;
  held::HeldPacks<T, kFirst<T, V>, 1, /*kPacked=*/true> first_;
  S shift_;
};

}  // namespace mica::kernels::norm_cuda
