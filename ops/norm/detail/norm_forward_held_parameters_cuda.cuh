#pragma once

// weight and bias in the kernel for held rows: read from global memory, kept in registers, or in shared memory.

#include <algorithm>
#include <type_traits>

#include <mica/ops/norm/detail/norm_forward_held_shape_cuda.cuh>

namespace mica::kernels::norm_cuda {

// A load that remains one instruction: if branches join after an ordinary load, the compiler splits it. It also
// remains in its place: the compiler moved ordinary loads out of loops over rows, and out of the branch that tests
// whether the column exists.
template <int V, class T>
__device__ Pack<T, V> load_whole(const T* from) {
  Pack<T, V> pack;
  if constexpr (sizeof(pack) == 8) {
    uint2& words = reinterpret_cast<uint2&>(pack);
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from));
  } else if constexpr (sizeof(pack) == 16) {
    uint4& words = reinterpret_cast<uint4&>(pack);
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
  } else {
    pack = load<V>(from);
  }
  return pack;
}

// Starts loading an array into the L2 cache, except for the elements at its ends that do not fill 16 bytes. Call it
// in one thread. Does nothing before compute capability 9.0.
template <class W>
__device__ void prefetch_to_l2(const W* from, std::int64_t count) {
#if __CUDA_ARCH__ >= 900
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(from) + 15) / 16 * 16;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(from + count) / 16 * 16;
  if (from != nullptr && begin < end) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(static_cast<unsigned>(end - begin)));
  }
#endif
}

// weight and bias of a thread's packs, which at() reads again for each row, kPart columns at a time. This template
// reads them from global memory, through the L1 cache; its specializations read them from shared memory or keep them
// in registers.
template <class H, ParametersIn kIn = H::kParameters>
class Parameters {
  using N = typename H::N;
  using W = typename H::W;

 public:
  static constexpr int kBytes = N::kCentered && !H::kAdds ? 8 : 16;                   // per read, limited by registers
  static constexpr int kPart = std::min(H::V, kBytes / static_cast<int>(sizeof(W)));  // columns

  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char*)
      : weight_(a.weight == nullptr ? nullptr : a.weight + place.first),
        bias_(a.bias == nullptr ? nullptr : a.bias + place.first) {
    if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0) {
      // Prefetches for all blocks. y is computed pack by pack, and without the prefetch, each pack would wait for
      // DRAM to deliver its parameters.
      prefetch_to_l2(a.weight, a.columns);
      prefetch_to_l2(a.bias, a.columns);
    }
  }

  static int bytes(int) { return 0; }  // of shared memory

  __device__ bool both() const { return (weight_ != nullptr) && (!N::kCentered || bias_ != nullptr); }

  /// Returns weight and bias of pack i, kPart columns from its column `part` on. kBoth: they are known to be present.
  template <bool kBoth, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart]) const {
    const int column = i * H::kStep + part;
    unpack(kBoth ? load_whole<kPart>(weight_ + column) : load_or<kPart>(weight_, column, 1), w);
    if constexpr (N::kCentered) {
      unpack(kBoth ? load_whole<kPart>(bias_ + column) : load_or<kPart>(bias_, column, 0), b);
    }
  }

 private:
  const W* weight_;
  const W* bias_;
};

// weight and bias in shared memory.
template <class H>
using SharedParametersOf = SharedParameters<typename H::W, H::V, kWarp, H::N::kCentered>;
template <class H>
class Parameters<H, ParametersIn::shared> : public SharedParametersOf<H> {
  using W = typename H::W;

 public:
  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char* memory)
      : SharedParametersOf<H>(of_slab(a.weight, place), of_slab(a.bias, place), place.first - place.slab,
                              place.columns - place.slab, memory) {}

 private:
  __device__ static const W* of_slab(const W* parameter, const Place<H>& place) {
    return parameter == nullptr ? nullptr : parameter + place.slab;
  }
};

// weight and bias in shared memory, for rows that may begin anywhere in a pack. There are V arrays. Array k has columns
// k, k + V, k + 2 V, …, from V columns before the slab on. For element j of their packs, neighboring lanes read
// neighboring entries of one array wherever the row begins, without bank conflicts.
template <class H>
class Parameters<H, ParametersIn::shared_by_column> {
  using N = typename H::N;
  using W = typename H::W;
  static constexpr int V = H::V;

 public:
  // Floats need no conversion in each row, but take more registers. Only the kernel for warps has enough.
  using Kept = std::conditional_t<H::kTeam == Team::warp, float, W>;
  struct Both {
    Kept weight;
    Kept bias;
  };
  using Entry = std::conditional_t<N::kCentered, Both, Kept>;

  /// The number of bytes for a row that `threads` threads share.
  static __host__ __device__ int bytes(int threads) { return V * stride(threads) * static_cast<int>(sizeof(Entry)); }

  /// All threads of the block call it, and then synchronize.
  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char* memory)
      : entries_(reinterpret_cast<Entry*>(memory)) {
    const int threads = blockDim.x * blockDim.y;
    const int columns = static_cast<int>(a.columns);
#pragma unroll 2
    for (int k = threadIdx.y * blockDim.x + threadIdx.x; k <= static_cast<int>(blockDim.x) * H::P; k += threads) {
      const int column = place.slab + (k - 1) * V;
      const Pack<W, V> w = load_columns(a.weight, column, columns, 1);
      [[maybe_unused]] const Pack<W, V> b = load_columns(N::kCentered ? a.bias : nullptr, column, columns, 0);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if constexpr (N::kCentered) {
          entries_[j * stride(blockDim.x) + k] = {static_cast<Kept>(w.at[j]), static_cast<Kept>(b.at[j])};
        } else {
          entries_[j * stride(blockDim.x) + k] = static_cast<Kept>(w.at[j]);
        }
      }
    }
  }

  /// The entry for element j of the thread's pack 0. The entry for pack i is i * kLanes places further.
  __device__ const Entry* column(int j, const Place<H>& place) const {
    const int from_pack = j - place.phase;  // may be in the previous pack
    const int array = from_pack < 0 ? from_pack + V : from_pack;
    return entries_ + array * stride(blockDim.x) + (place.first - place.slab) / V + (from_pack < 0 ? 0 : 1);
  }

  template <class S>
  __device__ static void values(const Entry& entry, S& w, S& b) {
    if constexpr (N::kCentered) {
      w = static_cast<S>(entry.weight);
      b = static_cast<S>(entry.bias);
    } else {
      w = static_cast<S>(entry);
    }
  }

  __device__ bool both() const { return true; }

 private:
  // Chosen so that the constructor's stores have no bank conflicts.
  static __host__ __device__ int stride(int threads) {
    return threads * H::P + 128 / (V * static_cast<int>(sizeof(Entry)));
  }

  // Loads V columns of a parameter, some of which may be before or after the row.
  __device__ static Pack<W, V> load_columns(const W* parameter, int first, int columns, float absent) {
    constexpr int kLoad = std::min(V, 16 / static_cast<int>(sizeof(W)));
    Pack<W, V> pack;
#pragma unroll
    for (int i = 0; i < V; i += kLoad) {
      Pack<W, kLoad>& part = reinterpret_cast<Pack<W, kLoad>&>(pack.at[i]);
      if (first >= 0 && first + V <= columns) {
        part = load_or<kLoad>(parameter, first + i, absent);
      } else {
#pragma unroll
        for (int j = 0; j < kLoad; ++j) {
          const int column = first + i + j;
          const bool present = column >= 0 && column < columns;
          part.at[j] = present ? load_or<1>(parameter, column, absent).at[0] : static_cast<W>(absent);
        }
      }
    }
    return pack;
  }

  Entry* entries_;
};

// weight and bias in registers. With few blocks, each team of which has one row, both must be present.
template <class H>
class Parameters<H, ParametersIn::registers> {
  using W = typename H::W;

 public:
  static constexpr int kPart = H::V;

  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char*)
      : kept_(expected(a.weight), H::N::kCentered ? expected(a.bias) : nullptr, place.first, place.packs()) {}

  static int bytes(int) { return 0; }

  __device__ bool both() const { return true; }

  template <bool, class S>
  __device__ void at(int i, int, S (&w)[kPart], S (&b)[kPart]) const {
    kept_.at(i, H::kStays ? held::opaque(0) : 0, w, b);
  }

 private:
  // Tells the compiler that a parameter is present, so that no load waits for a branch.
  __device__ static const W* expected(const W* parameter) {
    if constexpr (H::kFew) {
      __builtin_assume(parameter != nullptr);
    }
    return parameter;
  }

  KeptParameters<W, H::V, H::P, H::kStep, /*kAtOnce=*/(H::V >= 4)> kept_;
};

}  // namespace mica::kernels::norm_cuda
