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

// weight and bias in shared memory, for rows that may begin anywhere in a pack. There is an entry for each column, from
// V columns before the slab on, in runs of 32 packs:
//
//     run 0: column 0 of 32 packs, column 1 of 32 packs, …, column V − 1 of 32 packs;  run 1: column 0 of …
//
// For element j of their packs, neighboring lanes read neighboring entries wherever the row begins, without bank
// conflicts. A thread needs two addresses per row: one for the elements before the row's phase, which are columns of
// the previous pack, and one for the others. All its entries are at constant distances from these.
template <class H>
class Parameters<H, ParametersIn::shared_by_column> {
  using N = typename H::N;
  using W = typename H::W;
  static constexpr int V = H::V;
  static constexpr int kRun = kWarp * V;

 public:
  // Floats need no conversion in each row, but take more registers. Only the kernel for warps has enough.
  using Kept = std::conditional_t<H::kTeam == Team::warp, float, W>;
  using Entry = Pack<Kept, N::kCentered ? 2 : 1>;  // weight, bias

  /// The number of bytes for a row that `threads` threads share.
  static int bytes(int threads) { return (threads * H::P + kWarp) * V * static_cast<int>(sizeof(Entry)); }

  /// All threads of the block call it, and then synchronize.
  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char* memory)
      : entries_(reinterpret_cast<Entry*>(memory)) {
    const int threads = blockDim.x * blockDim.y;
    const int columns = static_cast<int>(a.columns);
#pragma unroll 2
    for (int pack = threadIdx.y * blockDim.x + threadIdx.x; pack <= static_cast<int>(blockDim.x) * H::P;
         pack += threads) {
      const int column = place.slab + (pack - 1) * V;
      const Pack<W, V> w = load_columns(a.weight, column, columns, 1);
      [[maybe_unused]] const Pack<W, V> b = load_columns(N::kCentered ? a.bias : nullptr, column, columns, 0);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        Entry& entry = entries_[first_of(pack) + j * kWarp];
        entry.at[0] = static_cast<Kept>(w.at[j]);
        if constexpr (N::kCentered) {
          entry.at[1] = static_cast<Kept>(b.at[j]);
        }
      }
    }
  }

  /// The entries for a thread's packs of one row.
  class OfRow {
   public:
    __device__ OfRow(const Entry* entries, const Place<H>& place) : phase_(place.phase) {
      const int pack = (place.first - place.slab) / V;
      before_ = entries + first_of(pack) + (V - phase_) * kWarp;
      from_ = entries + first_of(pack + 1) - phase_ * kWarp;
    }

    /// Returns weight and bias for element j of pack i.
    template <class S>
    __device__ void at(int i, int j, S& w, S& b) const {
      S values[N::kCentered ? 2 : 1];
      unpack((j < phase_ ? before_ : from_)[i * kRun + j * kWarp], values);
      w = values[0];
      if constexpr (N::kCentered) {
        b = values[1];
      }
    }

   private:
    int phase_;
    const Entry* before_;
    const Entry* from_;
  };
  __device__ OfRow of_row(const Place<H>& place) const { return OfRow(entries_, place); }

  __device__ bool both() const { return true; }

 private:
  // The entry for column 0 of a pack; pack 0 is the one before the slab.
  __device__ static int first_of(int pack) { return pack / kWarp * kRun + pack % kWarp; }

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
    kept_.at(i, H::kStays ? opaque(0) : 0, w, b);
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
