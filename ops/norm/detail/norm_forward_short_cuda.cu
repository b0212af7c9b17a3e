#include <algorithm>
#include <climits>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for short rows, which some or all lanes of a warp hold in registers:
//
//   x ──packs, a step ahead──▶ differences from the row's first element ──▶ mean ──▶ squares
//                                                │                                      │
//                                                └────── · rstd, weight, bias ◀─────────┘──▶ y
//
// For such rows, the instructions count, not only the memory: blocks are persistent, so that weight and bias of a
// thread's columns stay in registers, and if a lane has only one or two packs of a row, it computes several rows per
// step. The lanes that share a row are a team. If there are so few rows that some multiprocessors would have none, each
// team has a single row instead.
//
// Packs have 16 bytes if rows are aligned to that. Other rows are accessed by words of 4 bytes or, if they have an odd
// number of 16-bit elements, by single elements.

namespace mica::kernels::norm_cuda {

namespace {

// The template arguments of the kernel, and constants that follow from them. A lane has P packs of V columns. With
// kFew, each team has a single row.
template <class N_, class T_, class W_, int V_, int kLanes_, int P_, bool kFew_ = false>
struct ShortShape {
  using N = N_;
  using T = T_;
  using W = W_;
  using S = Accumulate<T>;
  static constexpr int kLanes = kLanes_;
  static constexpr int P = P_;
  static constexpr int V = V_;
  static constexpr int kPackBytes = V * sizeof(T);
  static constexpr bool kAligned = kPackBytes == 16;
  static constexpr int kStep = kLanes * V;       // columns from one pack of a lane to the next
  static constexpr int kTeams = kWarp / kLanes;  // per warp
  static constexpr bool kFew = kFew_;
  static constexpr int kRows = kFew ? 1 : most_rows_per_step(kPackBytes, V, P);  // of a team, per step
  static constexpr int kWarpRows = kTeams * kRows;                               // per step
  static constexpr int kSure = P - most_empty_packs(kPackBytes, P);              // packs that each lane has
  // Whether weight and bias are in shared memory, since they would need too many registers.
  static constexpr bool kShares = kAligned && sizeof(W) > sizeof(T) && P >= 3;

  // How many blocks must fit on a multiprocessor (__launch_bounds__).
  static constexpr int kLeastBlocks = [] {
    // This step's rows, and the next one's as they were loaded.
    constexpr int kRowWords = kRows * P * (V + (kPackBytes + 3) / 4);
    constexpr int kParameters = P * ((V * static_cast<int>(sizeof(W)) + 3) / 4) * (N::kCentered ? 2 : 1);
    constexpr int kParameterWords = kShares ? 8 : kParameters;
    constexpr int kOther = (N::kCentered ? 46 : 34) - (kAligned ? 0 : 8);
    return 65536 / kShortBlock / ((kRowWords + kParameterWords + kOther + 7) / 8 * 8);
  }();
};

// Sums over the rows of a step: adds up sums[r] over kLanes lanes, for all r at the same time.
template <int kLanes, int kRows, class S>
__device__ void sum_rows(S (&sums)[kRows]) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (S& sum : sums) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
  }
}

// What one thread does in the kernel.
template <class H>
class ShortRows {
  using N = typename H::N;
  using T = typename H::T;
  using W = typename H::W;
  using S = typename H::S;
  static constexpr bool kCentered = N::kCentered;
  static constexpr int V = H::V;
  static constexpr int P = H::P;
  static constexpr int kRows = H::kRows;
  static constexpr int kTeams = H::kTeams;
  // A pack as it is loaded. After a branch, the compiler would split packs of 16-bit elements.
  using Bits = std::conditional_t<H::kAligned, uint4, std::conditional_t<H::kPackBytes == 4, unsigned, std::uint16_t>>;

 public:
  __device__ explicit ShortRows(const Forward<T, W>& a)
      : a_(a),
        rows_(static_cast<int>(a.rows)),
        row_bytes_(static_cast<int>(a.columns * static_cast<int>(sizeof(T)))),
        lane_(static_cast<int>(threadIdx.x) % H::kLanes),
        packs_(packs_of(static_cast<int>(a.columns))) {
    // Hides how it was computed. Otherwise the compiler multiplies by the 64-bit number of columns.
    asm("" : "+r"(row_bytes_));
  }

  __device__ void run(unsigned char* memory) {
    constexpr int kWarps = kShortBlock / kWarp;
    const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kWarp);
    const int team = static_cast<int>(threadIdx.x) % kWarp / H::kLanes;
    const int step = static_cast<int>(gridDim.x) * kWarps * H::kWarpRows;
    Bits next[kRows][P];
    int row = warp * H::kWarpRows + team;
    if constexpr (H::kShares) {  // filling shared memory waits for loads
      load_rows(row, next);
    }
    const Parameters parameters = parameters_of(memory);
    if constexpr (H::kShares) {
      __syncthreads();
    } else {
      load_rows(row, next);
    }
    if (row - team >= rows_) {
      return;
    }
#pragma unroll 1
    do {
      S x[kRows][P][V];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < P; ++i) {
          unpack(reinterpret_cast<const Pack<T, V>&>(next[r][i]), x[r][i]);
        }
      }
      if constexpr (!H::kFew) {
        load_rows(row + step, next);
      }
      normalize(row, row - team + H::kWarpRows <= rows_, x, parameters);
      row += step;
    } while (!H::kFew && row - team < rows_);
  }

 private:
  using Parameters =
      std::conditional_t<H::kShares, SharedParameters<W, V, H::kLanes, kCentered>, KeptParameters<W, V, P, H::kStep>>;
  __device__ Parameters parameters_of(unsigned char* memory) const {
    const W* const bias = kCentered ? a_.bias : nullptr;
    if constexpr (H::kShares) {
      return {a_.weight, bias, lane_ * V, static_cast<int>(a_.columns), memory};
    } else {
      return {a_.weight, bias, lane_ * V, packs_};
    }
  }

  // Gets weight and bias of pack i.
  __device__ static void get(const Parameters& parameters, int i, int row, S (&w)[V], S (&b)[V]) {
    if constexpr (H::kShares) {
      constexpr int kPart = Parameters::kPart;
#pragma unroll
      for (int part = 0; part < V; part += kPart) {
        S(&w_part)[kPart] = reinterpret_cast<S(&)[kPart]>(w[part]);
        S(&b_part)[kPart] = reinterpret_cast<S(&)[kPart]>(b[part]);
        parameters.template at<true>(i, part, w_part, b_part);
      }
    } else {
      parameters.at(i, row, w, b);
    }
  }

  // Row number r of the team in the step whose first row is `row`.
  __device__ static int number(int row, int r) { return row + r * kTeams; }
  // The number of packs that the lane has.
  __device__ int packs_of(int columns) const {
    int packs = H::kSure;
#pragma unroll
    for (int i = H::kSure; i < P; ++i) {
      packs += (lane_ + i * H::kLanes) * V < columns;
    }
    return packs;
  }
  __device__ bool has(int i) const { return i < H::kSure || i < packs_; }
  // The lane's first element of a row.
  template <class U>
  __device__ U* at(U* matrix, int row) const {
    using Byte = std::conditional_t<std::is_const_v<U>, const char, char>;
    return reinterpret_cast<U*>(reinterpret_cast<Byte*>(matrix) + std::int64_t{row} * row_bytes_) + lane_ * V;
  }

  // Loads the packs of a step. Absent ones are zeros.
  __device__ void load_rows(int row, Bits (&packs)[kRows][P]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool present = number(row, r) < rows_;
      const T* const from = opaque(at(a_.x, number(row, r)));
#pragma unroll
      for (int i = 0; i < P; ++i) {
        packs[r][i] = Bits{};
        if (present && has(i)) {
          const Pack<T, V> pack = load_streaming<V>(from + i * H::kStep, a_.policy);
          packs[r][i] = reinterpret_cast<const Bits&>(pack);
        }
      }
    }
  }

  // Subtracts `from` from the elements of a row that are present. The others are and remain 0.
  __device__ void subtract(S (&x)[P][V], S from) const {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const S mine = has(i) ? from : S(0);
#pragma unroll
      for (S& value : x[i]) {
        value -= mine;
      }
    }
  }

  // Adds up a thread's elements of a row: term(x, sum) adds one element to a sum.
  template <class Term>
  __device__ static S sum_of(const S (&x)[P][V], const Term& term) {
    S sums[2] = {};  // take turns, so that consecutive additions do not depend on each other
#pragma unroll
    for (int i = 0; i < P; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[j % 2] = term(x[i][j], sums[j % 2]);
      }
    }
    return sums[0] + sums[1];
  }

  // Computes the rows of a step. whole: the warp has all rows of the step.
  __device__ void normalize(int row, bool whole, S (&x)[kRows][P][V], const Parameters& parameters) const {
    S shift[kRows] = {};
    S mean[kRows] = {};  // relative to the shift
    S squares[kRows];
    S rstd[kRows];
    if constexpr (kCentered) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        shift[r] = __shfl_sync(kAllLanes, x[r][0][0], 0, H::kLanes);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        subtract(x[r], shift[r]);
        mean[r] = sum_of(x[r], [](S value, S sum) { return sum + value; });
      }
      sum_rows<H::kLanes>(mean);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        mean[r] *= a_.in_row;
        subtract(x[r], mean[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      squares[r] = sum_of(x[r], [](S value, S sum) { return fma(value, value, sum); });
    }
    sum_rows<H::kLanes>(squares);
    bool overflow = false;  // or a row is not finite
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      overflow = overflow || (kCentered && !isfinite(squares[r]));
      rstd[r] = rsqrt(fma(squares[r], a_.in_row, a_.eps));
    }
    if (lane_ == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (number(row, r) < rows_) {
          write_statistics<N>(a_, number(row, r), shift[r] + mean[r], mean_rounding(shift[r], mean[r]), rstd[r], S(1));
        }
      }
    }
    whole ? write<true>(row, x, rstd, parameters) : write<false>(row, x, rstd, parameters);
    if (kCentered && __any_sync(kAllLanes, overflow)) {
      write_shrunk_rows(row, squares);
    }
  }

  template <bool kWhole>
  __device__ void write(int row, const S (&x)[kRows][P][V], const S (&rstd)[kRows],
                        const Parameters& parameters) const {
    T* to[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      to[r] = opaque(at(a_.y, number(row, r)));
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      S w[V];
      S b[V];
      get(parameters, i, row, w, b);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        S values[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const S x_hat = x[r][i][j] * rstd[r];
          values[j] = kCentered ? fma(x_hat, w[j], b[j]) : x_hat * w[j];
        }
        if ((kWhole || number(row, r) < rows_) && has(i)) {
          store_whole(to[r] + i * H::kStep, pack_of<T>(values));
        }
      }
    }
  }

  // Computes those rows of a step again whose squares overflow, or that are not finite, one after another.
  __device__ void write_shrunk_rows(int row, const S (&squares)[kRows]) const {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      S own = squares[0];
#pragma unroll
      for (int k = 1; k < kRows; ++k) {
        own = k == r ? squares[k] : own;
      }
      unsigned left = __ballot_sync(kAllLanes, !isfinite(own) && lane_ == 0 && number(row, r) < rows_);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int other = __shfl_sync(kAllLanes, number(row, r), __ffs(left) - 1);
        __syncwarp();  // other lanes have written this row, too
        write_shrunk_row<N, kWarp>(a_, other, a_.y + std::int64_t{other} * a_.columns);
      }
    }
  }

  const Forward<T, W>& a_;
  const int rows_;
  int row_bytes_;
  const int lane_;
  const int packs_;  // that the lane has
};

template <class H, class T = typename H::T, class W = typename H::W>
__global__ void __launch_bounds__(kShortBlock, H::kLeastBlocks) norm_forward_short_kernel(const Forward<T, W> a) {
  extern __shared__ __align__(16) unsigned char memory[];
  ShortRows<H>(a).run(memory);
}

// On the host.

template <class H, class T, class W>
void launch(const Forward<T, W>& a) {
  const auto kernel = norm_forward_short_kernel<H>;
  const int bytes =
      H::kShares ? SharedParameters<W, H::V, H::kLanes, H::N::kCentered>::bytes(static_cast<int>(a.columns)) : 0;
  cuda::Launch launch(1, kShortBlock, bytes);
  const int resident = H::kLeastBlocks * cuda::multiprocessor_count();
  constexpr std::int64_t kBlockRows = kShortBlock / kWarp * H::kWarpRows;
  constexpr std::int64_t kMostRows = INT_MAX / 2;  // the kernel counts rows in int
  for (std::int64_t begin = 0; begin < a.rows; begin += kMostRows) {
    const Forward<T, W> part = rows_of(a, begin, std::min(kMostRows, a.rows - begin));
    const std::int64_t wanted = (part.rows + kBlockRows - 1) / kBlockRows;
    const auto blocks = H::kFew ? static_cast<unsigned>(wanted) : blocks_of_turns(wanted, /*turns=*/6, resident);
    launch.grid(blocks).run(kernel, "norm_forward_short_kernel", part);
  }
}

}  // namespace

void forward_short(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_packs<4>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    const auto one_of = [&]<int V, int kLanes, int... P>() {
      const auto launch_packs = [&]<int kPacks>() {
        if constexpr (most_rows_per_step(V * sizeof(T), V, kPacks) > 1) {
          if (plan.few) {
            return launch<ShortShape<N, T, W, V, kLanes, kPacks, /*kFew=*/true>>(a);
          }
        }
        launch<ShortShape<N, T, W, V, kLanes, kPacks>>(a);
      };
      return plan.pack == V && plan.threads == kLanes &&
             ((plan.packs == P && (launch_packs.template operator()<P>(), true)) || ...);
    };
    bool done;
    if constexpr (sizeof(T) == 2) {
      done = one_of.template operator()<8, 8, 1, 2, 3>() || one_of.template operator()<8, 16, 2, 3>() ||
             one_of.template operator()<8, 32, 2>() ||  // packs of 16 bytes
             one_of.template operator()<2, 8, 2, 4>() || one_of.template operator()<2, 16, 3, 4>() ||
             one_of.template operator()<2, 32, 3, 4, 6, 8, 12, 16>() ||  // words
             one_of.template operator()<1, 8, 2, 4, 6>() || one_of.template operator()<1, 16, 4, 6, 8>() ||
             one_of.template operator()<1, 32, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32>();
    } else {
      done = one_of.template operator()<4, 8, 1, 2>() || one_of.template operator()<4, 16, 2>() ||
             one_of.template operator()<4, 32, 2>() ||  // packs of 16 bytes
             one_of.template operator()<1, 8, 2, 4, 6, 8>() || one_of.template operator()<1, 16, 6, 8>() ||
             one_of.template operator()<1, 32, 6, 8, 10, 12, 14, 16>();
      if constexpr (N::kCentered) {
        done = done || one_of.template operator()<1, 32, 20, 24, 28, 32>();
      } else {
        done = done || one_of.template operator()<4, 32, 3, 4, 5, 6, 7, 8>();
      }
    }
    check(done, "norm: there is no forward for short rows with {} packs for {} lanes", plan.packs, plan.threads);
  });
}

}  // namespace mica::kernels::norm_cuda
