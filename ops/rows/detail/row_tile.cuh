#pragma once

// A row in the registers of the threads that share it.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/dtype.h>

namespace mica::kernels::rows {

using cuda::Pack;

/// A pack of equal elements.
template <int V, class T>
__device__ Pack<T, V> pack_of_one(T value) {
  Pack<T, V> pack;
#pragma unroll
  for (T& element : pack.at) {
    element = value;
  }
  return pack;
}

/// A thread's P packs of V columns of a row. If kPacked, they keep the dtype in which they were read, so that 16-bit
/// elements take half the registers. Otherwise they have the type of sums, and can be replaced by computed values.
template <class T, int V, int P, bool kPacked>
class RowTile {
 public:
  using S = Accumulate<T>;
  static constexpr int kWords = P * V * static_cast<int>(kPacked ? sizeof(T) : sizeof(S)) / 4;

  /// The thread's first column, if the packs of kLanes neighboring lanes are adjacent.
  template <int kLanes>
  __device__ static int first_column() {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / kLanes * (P * kLanes) + thread % kLanes) * V;
  }

  /// Loads packs of 16 bytes, kStep columns apart, with a policy for the L2 cache: those that begin in the `left`
  /// columns from `from` on. The others get `absent` elements.
  template <int kStep>
  __device__ void load(const T* from, int left, std::uint64_t policy, T absent) {
    const Pack<T, V> past = pack_of_one<V>(absent);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      // Loaded as words, since the compiler would wait for each load of single elements to move them one by one.
      uint4 words = reinterpret_cast<const uint4&>(past);
      if (i * kStep < left) {
        const Pack<T, V> pack = cuda::load_streaming<V>(from + i * kStep, policy);
        words = reinterpret_cast<const uint4&>(pack);
      }
      set(i, words);
    }
  }
  __device__ void set(int i, const uint4& words) { set(i, reinterpret_cast<const Pack<T, V>&>(words)); }

  __device__ void set(int i, const Pack<T, V>& pack) {
    if constexpr (kPacked) {
      tile_[i] = reinterpret_cast<const Word&>(pack);
    } else {
      cuda::unpack(pack, tile_[i].at);
    }
  }

  __device__ void values(int i, S (&x)[V]) const {
    if constexpr (kPacked) {
      cuda::unpack(pack(i), x);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = tile_[i].at[j];
      }
    }
  }
  __device__ const Pack<T, V>& pack(int i) const {
    static_assert(kPacked);
    return reinterpret_cast<const Pack<T, V>&>(tile_[i]);
  }

  __device__ void replace(int i, const S (&x)[V]) {
    static_assert(!kPacked);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      tile_[i].at[j] = x[j];
    }
  }

  /// Makes the compiler unpack the packs again at their next use, instead of keeping the elements in registers until
  /// then.
  __device__ void forget() {
    const unsigned zero = threadIdx.z;
#pragma unroll
    for (auto& word : tile_) {
      if constexpr (std::is_same_v<Word, uint4>) {
        word = make_uint4(word.x | zero, word.y | zero, word.z | zero, word.w | zero);
      } else if constexpr (std::is_same_v<Word, unsigned>) {
        word |= zero;
      }
    }
  }

 private:
  // 16-bit elements are kept as 32-bit words, since the compiler would unpack single elements right after loading them.
  using Narrow = std::conditional_t<V == 8, uint4, unsigned>;
  using Word =
      std::conditional_t<!kPacked, Pack<S, V>, std::conditional_t<sizeof(T) == 2 && V != 1, Narrow, Pack<T, V>>>;
  static_assert(!kPacked || sizeof(Word) == sizeof(Pack<T, V>));

  Word tile_[P];
};

}  // namespace mica::kernels::rows
