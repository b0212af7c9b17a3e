#pragma once

// weight and bias in forward's kernels: read from global memory, kept in registers, or in shared memory.

#include <algorithm>
#include <type_traits>

#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

namespace mica::kernels::norm_cuda {

// Each class has the parameters of a thread's packs of V columns, which begin kStep columns (kLanes packs) apart:
//
//     both()                             // whether weight and, if needed, bias are known to be present
//     at<kBoth>(i, part, w, b, row)      // weight and bias of pack i, kPart columns from its column `part` on
//
// Parameters that are null have the elements 1 (weight) and 0 (bias). Without kBias, b is not set.

/// In registers, in their own dtype. With kAtOnce, both are present, and all loads are issued immediately: they are
/// relaxed, so that the compiler does not delay any, and have the scope cta, so that they use the L1 cache.
template <class W, int V, int P, int kStep, bool kBias, bool kAtOnce = false>
class KeptParameters {
 public:
  static constexpr int kPart = V;

  /// weight and bias are those of the whole row. The thread has `packs` packs, the first of which begins at column
  /// `first`.
  __device__ KeptParameters(const W* weight, const W* bias, int first, int packs) {
    if constexpr (kAtOnce) {  // so that no load waits for a branch
      __builtin_assume(weight != nullptr);
      if constexpr (kBias) {
        __builtin_assume(bias != nullptr);
      }
    }
    load_from(weight, 1, first, packs, weights_);
    load_from(kBias ? bias : nullptr, 0, first, packs, biases_);
  }

  __device__ bool both() const { return true; }

  /// `row` is a number that changes from row to row. It keeps the compiler from unpacking pairs once for all rows, into
  /// twice as many registers.
  template <bool, class S>
  __device__ void at(int i, int, S (&weight)[V], S (&bias)[V], int row) const {
    unpack_anew(weights_[i], row, weight);
    unpack_anew(biases_[i], row, bias);
  }

 private:
  // 16-bit elements are kept as 32-bit words: after a branch, the compiler would split packs of 16-bit elements, and
  // wait for each load.
  static constexpr bool kWords = sizeof(W) == 2 && V > 1;
  using Kept = std::conditional_t<kWords, Pack<unsigned, V / (kWords ? 2 : 1)>, Pack<W, V>>;

  __device__ static Kept kept(W value) {
    Kept pack;
#pragma unroll
    for (auto& element : pack.at) {
      if constexpr (kWords) {
        element = 0x10001u * reinterpret_cast<const std::uint16_t&>(value);
      } else {
        element = value;
      }
    }
    return pack;
  }

  __device__ static Kept load_pack(const W* from) {
    Kept pack;
    if constexpr (kAtOnce) {
      static_assert(sizeof(Kept) % 16 == 0);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Kept) / 16); ++i) {
        uint4& words = reinterpret_cast<uint4*>(&pack)[i];
        asm volatile("ld.relaxed.cta.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(reinterpret_cast<const uint4*>(from) + i));
      }
    } else {
      pack = *reinterpret_cast<const Kept*>(from);
    }
    return pack;
  }

  __device__ static void load_from(const W* parameter, float absent, int first, int count, Kept (&packs)[P]) {
#pragma unroll
    for (Kept& pack : packs) {
      pack = kept(static_cast<W>(absent));
    }
    if (parameter != nullptr) {  // one test for all packs, so that no load waits for a branch
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (i < count) {
          packs[i] = load_pack(parameter + first + i * kStep);
        }
      }
    }
  }

  template <class S>
  __device__ static void unpack_anew(Kept kept, int row, S (&values)[V]) {
    if constexpr (kWords && V == 2) {
      asm("" : "+r"(kept.at[0]) : "r"(row));
    }
    unpack(reinterpret_cast<const Pack<W, V>&>(kept), values);
  }

  Kept weights_[P];
  Kept biases_[P];
};

/// In shared memory, in parts of 16 bytes. They are ordered such that neighboring lanes read adjacent parts: 32 packs
/// of V columns become V / kPart runs of 32 parts, one part of each pack.
template <class W, int V, bool kBias>
class SharedParameters {
 public:
  static constexpr int kPart = 16 / sizeof(W);

  /// All threads of the block call it with the same `memory`, and then synchronize. A thread's first column is `first`.
  __device__ SharedParameters(const W* weight, const W* bias, int first, int columns, unsigned char* memory)
      : weight_(reinterpret_cast<W*>(memory) + index_of(first)), bias_(weight_ + padded(columns)) {
    W* const shared = reinterpret_cast<W*>(memory);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y;
#pragma unroll 1
    for (int column = thread * kPart; column < columns; column += threads * kPart) {
      store(shared + index_of(column), part_of(weight, column, 1));
      if constexpr (kBias) {
        store(shared + padded(columns) + index_of(column), part_of(bias, column, 0));
      }
    }
  }

  static int bytes(int columns) { return (kBias ? 2 : 1) * padded(columns) * static_cast<int>(sizeof(W)); }

  __device__ bool both() const { return true; }

  template <bool, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart], int) const {
    const int from = i * (kWarp * V) + part / kPart * (kWarp * kPart);
    unpack(load<kPart>(weight_ + from), w);
    if constexpr (kBias) {
      unpack(load<kPart>(bias_ + from), b);
    }
  }

 private:
  // An ordinary load: the compiler would move load_or() out of the loop, and spill registers.
  __device__ static Pack<W, kPart> part_of(const W* parameter, int column, float absent) {
    return parameter == nullptr ? load_or<kPart, W>(nullptr, 0, absent) : load<kPart>(parameter + column);
  }

  static __host__ __device__ int padded(int columns) { return (columns + kWarp * V - 1) / (kWarp * V) * (kWarp * V); }

  // The index in shared memory of the part that begins at `column`.
  __device__ static int index_of(int column) {
    const int pack = column / V;
    return pack / kWarp * (kWarp * V) + column % V / kPart * (kWarp * kPart) + pack % kWarp * kPart;
  }

  const W* weight_;
  const W* bias_;
};

// A load that the compiler neither splits, as it does before branches join, nor moves out of the loop over rows or out
// of the test whether the column exists.
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

// Starts loading an array into the L2 cache, except for ends of less than 16 bytes. Call it in one thread. Does nothing
// before compute capability 9.0.
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

/// In global memory, read through the L1 cache for each row, up to kBytes at a time.
template <class W, int V, int kStep, bool kBias, int kBytes>
class GlobalParameters {
 public:
  static constexpr int kPart = std::min(V, kBytes / static_cast<int>(sizeof(W)));

  /// weight and bias are those of the whole row. The thread's first pack begins at column `first`.
  __device__ GlobalParameters(const W* weight, const W* bias, int first, std::int64_t columns)
      : weight_(weight == nullptr ? nullptr : weight + first), bias_(bias == nullptr ? nullptr : bias + first) {
    if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0) {
      // y is computed pack by pack, and each pack would wait for DRAM to deliver its parameters.
      prefetch_to_l2(weight, columns);
      prefetch_to_l2(bias, columns);
    }
  }

  __device__ bool both() const { return weight_ != nullptr && (!kBias || bias_ != nullptr); }

  template <bool kBoth, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart], int) const {
    const int column = i * kStep + part;
    unpack(kBoth ? load_whole<kPart>(weight_ + column) : load_or<kPart>(weight_, column, 1), w);
    if constexpr (kBias) {
      unpack(kBoth ? load_whole<kPart>(bias_ + column) : load_or<kPart>(bias_, column, 0), b);
    }
  }

 private:
  const W* weight_;
  const W* bias_;
};

}  // namespace mica::kernels::norm_cuda
