#pragma once

// From packed integers to the 16-bit fragments that tensor cores multiply, and what makes weights of them. README.md
// has the picture. Included by .cu files only.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/wgmma.cuh>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels::quantized_cuda {

inline constexpr int kUnit = 32;  // rows of the weight that lie in one group; a thread has 8 of them in a column

// Scales or zeros.
struct FactorMatrix {
  enum Kind { kNone, kOne, kNarrow, kWide };  // one number, or numbers of the type of x or float32

  const void* data = nullptr;
  int kind = kNone;

  FactorMatrix() = default;
  explicit FactorMatrix(const Tensor& x) {
    if (x.defined()) {
      data = x.raw_data();
      kind = x.dim() == 0 ? kOne : x.dtype() == float32 ? kWide : kNarrow;
    }
  }
  __host__ __device__ bool each() const { return kind >= kNarrow; }
  __host__ __device__ int size() const { return kind == kWide ? 4 : 2; }
};

// What a weight is made of: q and these.
struct Grids {
  FactorMatrix scale;
  FactorMatrix zero;
  bool adds;  // the zero; else it is subtracted

  /// The zero of columns that have none of their own.
  __device__ float one_zero() const {
    return zero.kind == FactorMatrix::kOne ? *static_cast<const float*>(zero.data) : 0;
  }
};

// A product on tensor cores: y (m, columns) = row_factors · (x · weight) · column_factors.
struct Product {
  const std::uint32_t* words;
  Grids grids;
  int columns;
  int rows;         // of the weight
  int group_shift;  // a group is 1 << group_shift rows
  int m;
  void* y;
  const float* row_factors;     // or null
  const float* column_factors;  // or null
};

// Two 16-bit floats in a register, the first one low.

template <class T>
__device__ float2 to_floats(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}

// A thread has 8 neighbors along K of a column, an octet: a word of 4 bits, two of 8 bits, or a part of one.
// The pair c of an octet is its members c and c + 4, as two 16-bit floats in a register.

template <int kBits>
constexpr int kWordsEach = kBits == 8 ? 2 : 1;

__device__ inline std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  return __byte_perm(a, b, selector);
}

template <class T>
constexpr int kFraction = std::is_same_v<T, Half> ? 10 : 7;  // bits
template <class T>
constexpr int kBias = std::is_same_v<T, Half> ? 15 : 127;  // of an exponent

/// An octet so that the lowest bits of its members c and c + 4 lie 16 bits apart; `place` is that of the octet among
/// the 4 of a unit.
template <class T, int kBits>
__device__ std::uint32_t spread(std::uint32_t word, int place) {
  if constexpr (kBits == 2) {
    const std::uint32_t first = place % 2 * 2;
    return bytes_of(word, 0, 0x4040 | first | (first + 1) << 8);
  } else if constexpr (kBits == 1) {
    return bytes_of(word, 0, 0x4440 | place) * (0x1001u << (kFraction<T> - 4));  // member 3 on top of the fraction
  } else {
    return word;
  }
}

// Where in a fraction the lowest bit of an integer goes: as high as some pair of a spread octet is, which needs no
// shift.
template <class T, int kBits>
constexpr int kPosition = kBits == 8   ? 0
                          : kBits == 1 ? kFraction<T> - 1
                                       : (kFraction<T> / kBits - 1 < 3 ? kFraction<T> / kBits - 1 : 3) * kBits;

// What is added to the integers of pairs.
template <class T, int kBits>
constexpr int kAdded = kBits == 8 && std::is_same_v<T, BFloat16> ? 0 : 1 << (kFraction<T> - kPosition<T, kBits>);

/// Two integers plus kAdded as T, exactly and without a conversion: they become bits of a fraction. That of bfloat16 is
/// too short for 8 bits, which take the way through float32.
template <class T, int kBits>
__device__ std::uint32_t pair_at(const std::uint32_t (&octet)[kWordsEach<kBits>], int c) {
  if constexpr (kAdded<T, kBits> == 0) {
    const float low = __uint_as_float(bytes_of(octet[0], 0x4B000000, 0x7440 | c)) - 0x1p23f;
    const float high = __uint_as_float(bytes_of(octet[1], 0x4B000000, 0x7440 | c)) - 0x1p23f;
    return bytes_of(__float_as_uint(low), __float_as_uint(high), 0x7632);
  } else {
    constexpr int kFirst = kPosition<T, kBits>;
    constexpr std::uint32_t kBoth = 0x00010001;
    constexpr std::uint32_t kMask = (((1u << kBits) - 1) << kFirst) * kBoth;
    constexpr std::uint32_t kPower =
        (static_cast<std::uint32_t>(kBias<T> + kFraction<T> - kFirst) << kFraction<T>)*kBoth;
    const std::uint32_t both = kBits == 8 ? bytes_of(octet[0], octet[1], 0x0400 | c << 8 | c) : octet[0];
    const int at = kBits == 8 ? 0 : kBits == 1 ? kFraction<T> - 4 + c : c * kBits;
    const std::uint32_t moved = at < kFirst ? both << (kFirst - at) : both >> (at - kFirst);
    std::uint32_t result;  // (moved & kMask) | kPower, in one instruction
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(moved), "n"(kMask), "r"(kPower));
    return result;
  }
}

/// Neighboring words at an address of shared memory.
template <int kSize>
__device__ void load_words(std::uint32_t from, std::uint32_t (&to)[kSize]) {
  if constexpr (kSize == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  } else if constexpr (kSize == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
  }
}

// The octets of a thread's columns in one unit.
template <class T, int kBits, int kColumnsEach>
struct Octets {
  std::uint32_t words[kColumnsEach][kWordsEach<kBits>];

  /// The first word of this thread is at `address`.
  __device__ void load(std::uint32_t address, int pitch, int place) {
    std::uint32_t rows[kWordsEach<kBits>][kColumnsEach];
#pragma unroll
    for (int i = 0; i < kWordsEach<kBits>; ++i) {
      load_words(address + i * pitch, rows[i]);
    }
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c) {
#pragma unroll
      for (int i = 0; i < kWordsEach<kBits>; ++i) {
        words[c][i] = spread<T, kBits>(rows[i][c], place);
      }
    }
  }

  /// The fragment of one of a unit's two steps, of columns 2 half and 2 half + 1.
  __device__ void get(int half, int step, std::uint32_t (&fragment)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[i] = pair_at<T, kBits>(words[2 * half + i % 2], 2 * step + i / 2);
    }
  }
};

/// Values of float32, or of T.
template <class T, int kSize>
__device__ void load_values(std::uint32_t from, bool wide, float (&to)[kSize]) {
  if (wide) {
    std::uint32_t bits[kSize];
    load_words(from, bits);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      to[i] = __uint_as_float(bits[i]);
    }
  } else {
    std::uint32_t pairs[kSize / 2];
    load_words(from, pairs);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float2 two = to_floats<T>(pairs[i]);
      to[2 * i] = two.x;
      to[2 * i + 1] = two.y;
    }
  }
}

// Scales and zeros of a thread's columns.
template <int kColumnsEach>
struct OwnGrids {
  float scale[kColumnsEach];
  float zero[kColumnsEach];
};

/// From shared memory.
template <class T, int kColumnsEach>
__device__ OwnGrids<kColumnsEach> load_grids(const Grids& grids, std::uint32_t scales, std::uint32_t zeros) {
  OwnGrids<kColumnsEach> own;
  if (grids.scale.kind == FactorMatrix::kNarrow && grids.zero.kind == FactorMatrix::kNarrow) {  // the usual case
    load_values<T>(scales, false, own.scale);
    load_values<T>(zeros, false, own.zero);
    return own;
  }
#pragma unroll
  for (int c = 0; c < kColumnsEach; ++c) {
    own.scale[c] = 1;
    own.zero[c] = grids.one_zero();
  }
  if (grids.scale.each()) {
    load_values<T>(scales, grids.scale.kind == FactorMatrix::kWide, own.scale);
  }
  if (grids.zero.each()) {
    load_values<T>(zeros, grids.zero.kind == FactorMatrix::kWide, own.zero);
  }
  return own;
}

/// Makes weights of a fragment of integers of two columns: (q − zero) · scale, or q · scale + zero.
template <class T, int kBits>
__device__ void scale(std::uint32_t (&fragment)[4], bool adds, const OwnGrids<2>& own) {
  const auto weight = [&](float q, int c) {
    return adds ? fmaf(q - kAdded<T, kBits>, own.scale[c], own.zero[c])
                : (q - (kAdded<T, kBits> + own.zero[c])) * own.scale[c];
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = to_floats<T>(fragment[i]);
    fragment[i] = cuda::pair_of<T>(weight(two.x, i % 2), weight(two.y, i % 2));
  }
}

// The same in T, two weights at once, which takes half the instructions: (q − center) · scale + added, where q and
// center have kAdded in them. It rounds no more than the other way where the difference is exact.

/// Arithmetic of two 16-bit floats in a register.
template <class T>
class Pair {
  using Two = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;

  __device__ static Two two(std::uint32_t bits) { return *reinterpret_cast<const Two*>(&bits); }
  __device__ static std::uint32_t bits(Two two) { return *reinterpret_cast<const std::uint32_t*>(&two); }

 public:
  __device__ static std::uint32_t of(float value) { return cuda::pair_of<T>(value, value); }
  __device__ static std::uint32_t plus(std::uint32_t a, std::uint32_t b) { return bits(__hadd2(two(a), two(b))); }
  __device__ static std::uint32_t minus(std::uint32_t a, std::uint32_t b) { return bits(__hsub2(two(a), two(b))); }
  __device__ static std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
};

// Of two neighboring columns, each number twice in a register.
struct PairFactors {
  std::uint32_t center[2];
  std::uint32_t scale[2];
  std::uint32_t added[2];
};

/// Reads PairFactors, where scales and zeros allow it.
template <class T, int kBits>
class PairGrids {
  static constexpr std::uint32_t kNegativeZero = 0x80008000;  // adds nothing to a 0 of either sign

 public:
  __device__ explicit PairGrids(const Grids& grids)
      : adds_(grids.adds),
        each_scale_(grids.scale.each()),
        each_zero_(grids.zero.each()),
        scale_(Pair<T>::of(1)),
        zero_(Pair<T>::of(grids.one_zero())),
        power_(Pair<T>::of(kAdded<T, kBits>)) {
    allowed_ = kAdded<T, kBits> > 0 && grids.scale.kind != FactorMatrix::kWide &&
               grids.zero.kind != FactorMatrix::kWide && to_floats<T>(zero_).x == grids.one_zero();
    for (int* const i : {&adds_, &each_scale_, &each_zero_}) {
      asm volatile("" : "+r"(*i));  // the compiler would rather read them again and again
    }
  }

  __device__ bool allowed() const { return allowed_; }

  /// The factors at these addresses of shared memory; false, for all of a warp, if they would round more than once.
  __device__ bool load(std::uint32_t scales, std::uint32_t zeros, PairFactors& factors) const {
    std::uint32_t scale[1] = {scale_};
    std::uint32_t zero[1] = {zero_};
    if (each_scale_ != 0) {
      load_words(scales, scale);
    }
    if (each_zero_ != 0) {
      load_words(zeros, zero);
    }
    const std::uint32_t center = adds_ != 0 ? power_ : Pair<T>::plus(power_, zero[0]);
    const std::uint32_t added = adds_ != 0 ? zero[0] : kNegativeZero;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const std::uint32_t twice = c == 0 ? 0x1010 : 0x3232;
      factors.center[c] = bytes_of(center, 0, twice);
      factors.scale[c] = bytes_of(scale[0], 0, twice);
      factors.added[c] = bytes_of(added, 0, twice);
    }
    // Zeros that are integers of the format; others may be too fine for a sum with kAdded.
    return __all_sync(0xffffffff, adds_ != 0 || Pair<T>::minus(center, power_) == zero[0]);
  }

 private:
  int adds_;
  int each_scale_;
  int each_zero_;
  std::uint32_t scale_;
  std::uint32_t zero_;
  std::uint32_t power_;
  bool allowed_;
};

/// Makes weights of a fragment of integers.
template <class T>
__device__ void scale(std::uint32_t (&fragment)[4], const PairFactors& factors) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    fragment[i] = Pair<T>::multiply_add(Pair<T>::minus(fragment[i], factors.center[i % 2]), factors.scale[i % 2],
                                        factors.added[i % 2]);
  }
}

__device__ inline float4 plus(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

/// Four neighbors of a row of y.
template <class T>
__device__ void store_row(const Product& a, int row, int column, float4 sum) {
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    values[c] *= a.column_factors != nullptr ? a.column_factors[column + c] : 1.0f;
    values[c] *= a.row_factors != nullptr ? a.row_factors[row] : 1.0f;
  }
  *reinterpret_cast<uint2*>(static_cast<T*>(a.y) + std::int64_t{row} * a.columns + column) =
      make_uint2(cuda::pair_of<T>(values[0], values[1]), cuda::pair_of<T>(values[2], values[3]));
}

}  // namespace mica::kernels::quantized_cuda
