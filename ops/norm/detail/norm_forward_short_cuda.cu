#include <algorithm>
#include <climits>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_parameters_cuda.cuh>

// Forward for short aligned rows, which are in the registers of some or all lanes of a warp:
//
//   x ──packs, a step ahead──▶ differences from the row's first element ──▶ mean ──▶ squares
//                                                │                                      │
//                                                └────── · rstd, weight, bias ◀─────────┘──▶ y
//
// The number of instructions matters as much as memory. So blocks are persistent, with weight and bias of a thread's
// columns in registers, and a group computes several rows per step, of which a lane has one or two packs.

namespace mica::kernels::norm_cuda {

namespace {

/// The template arguments of the kernel, and constants that follow from them. A lane has P packs of V columns.
template <class N_, class T_, class W_, RowKernel kShape>
struct ShortShape {
  using N = N_;
  using T = T_;
  using W = W_;
  using S = Accumulate<T>;
  static constexpr int kLanes = kShape.lanes;
  static constexpr int P = kShape.packs;
  static constexpr int V = 16 / sizeof(T);
  static constexpr int kStep = kLanes * V;           // columns from one pack of a lane to the next
  static constexpr int kGroups = kWarp / kLanes;     // per warp
  static constexpr int kRows = 4 / P;                // of a group, per step
  static constexpr int kWarpRows = kGroups * kRows;  // per step
  using Parameters = KeptParameters<W, V, P, kStep, N::kCentered>;

  // How many blocks must fit on a multiprocessor (__launch_bounds__).
  static constexpr int kLeastBlocks = [] {
    constexpr int kRowWords = kRows * P * (V + 4);  // this step's rows, and the next one's as they were loaded
    constexpr int kParameterWords = P * (V * static_cast<int>(sizeof(W)) / 4) * (N::kCentered ? 2 : 1);
    constexpr int kOther = N::kCentered ? 46 : 34;
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
  static constexpr int kGroups = H::kGroups;
  using Parameters = typename H::Parameters;

 public:
  __device__ explicit ShortRows(const Forward<T, W>& a)
      : a_(a),
        rows_(static_cast<int>(a.rows)),
        row_bytes_(static_cast<int>(a.columns * static_cast<int>(sizeof(T)))),
        lane_(static_cast<int>(threadIdx.x) % H::kLanes),
        packs_(P - 1 + ((lane_ + (P - 1) * H::kLanes) * V < static_cast<int>(a.columns))) {
    // Opaque, since otherwise the compiler multiplies by the 64-bit number of columns.
    asm("" : "+r"(row_bytes_));
  }

  __device__ void run() {
    constexpr int kWarps = kShortBlock / kWarp;
    const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kWarp);
    const int group = static_cast<int>(threadIdx.x) % kWarp / H::kLanes;
    const int step = static_cast<int>(gridDim.x) * kWarps * H::kWarpRows;
    uint4 next[kRows][P];  // after a branch, the compiler would split packs of 16-bit elements
    int row = warp * H::kWarpRows + group;
    const Parameters parameters(a_.weight, a_.bias, lane_ * V, packs_);
    load_rows(row, next);
    if (row - group >= rows_) {
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
      load_rows(row + step, next);
      normalize(row, row - group + H::kWarpRows <= rows_, x, parameters);
      row += step;
    } while (row - group < rows_);
  }

 private:
  // Row number r of the group in the step whose first row is `row`.
  __device__ static int number(int row, int r) { return row + r * kGroups; }
  // Whether the lane has pack i. It always has all but the last.
  __device__ bool has(int i) const { return i < P - 1 || i < packs_; }
  // The lane's first element of a row.
  template <class U>
  __device__ U* at(U* matrix, int row) const {
    using Byte = std::conditional_t<std::is_const_v<U>, const char, char>;
    return reinterpret_cast<U*>(reinterpret_cast<Byte*>(matrix) + std::int64_t{row} * row_bytes_) + lane_ * V;
  }

  // Loads the packs of a step. Absent ones are zeros.
  __device__ void load_rows(int row, uint4 (&packs)[kRows][P]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool present = number(row, r) < rows_;
      const T* const from = opaque(at(a_.x, number(row, r)));
#pragma unroll
      for (int i = 0; i < P; ++i) {
        packs[r][i] = uint4{};
        if (present && has(i)) {
          const Pack<T, V> pack = load_streaming<V>(from + i * H::kStep, a_.policy);
          packs[r][i] = reinterpret_cast<const uint4&>(pack);
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
      parameters.template at<true>(i, 0, w, b, row);
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
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        write_shrunk_row<N, kWarp>(a_, a_.x + std::int64_t{other} * a_.columns, other, a_.eps, /*mine=*/true, lane == 0,
                                   [&](const auto& write) {
#pragma unroll 1
                                     for (int column = lane; column < static_cast<int>(a_.columns); column += kWarp) {
                                       write(column);
                                     }
                                   });
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
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  ShortRows<H>(a).run();
}

// On the host.

/// The number of blocks to launch, of which `resident` can run at once and `wanted` would have one step each. More
/// blocks balance the load, but each block loads the parameters, so that it should have at least 6 steps.
unsigned blocks_of_steps(std::int64_t wanted, int resident) {
  const std::int64_t waves = std::clamp<std::int64_t>(wanted / 6 / resident, 1, 16);
  return static_cast<unsigned>(std::min(wanted, waves * resident));
}

template <class H, class T, class W>
void launch(const Forward<T, W>& a) {
  const int resident = H::kLeastBlocks * cuda::multiprocessor_count();
  constexpr std::int64_t kBlockRows = kShortBlock / kWarp * H::kWarpRows;
  constexpr std::int64_t kMostRows = INT_MAX / 2;  // the kernel counts rows in int
  for (std::int64_t begin = 0; begin < a.rows; begin += kMostRows) {
    const Forward<T, W> part = rows_of(a, begin, std::min(kMostRows, a.rows - begin));
    const unsigned blocks = blocks_of_steps((part.rows + kBlockRows - 1) / kBlockRows, resident);
    cuda::Launch(blocks, kShortBlock).dependent().run(norm_forward_short_kernel<H>, "norm_forward_short_kernel", part);
  }
}

}  // namespace

void forward_short(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_packs<4>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    const bool found = norm_forward_kernels::Short::call(
        plan.shape, [&]<RowKernel kShape>() { launch<ShortShape<N, T, W, kShape>>(a); });
    check(found, "norm: no forward for short rows has {} packs for {} lanes", plan.shape.packs, plan.threads);
  });
}

}  // namespace mica::kernels::norm_cuda
