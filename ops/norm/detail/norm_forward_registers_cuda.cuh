#pragma once

// Forward for rows that are read once, into the registers of some lanes, a warp, a block or a cluster:
//
//   x (+ residual, x_bias) ──▶ packs in registers ──────────────────────▶ · rstd, weight, bias ──▶ y
//                                │       │                                      ▲
//                                ▼       └─▶ differences from a shift ──▶ moments, reduced over the group
//                               sum
//
// In a single wave, a thread has enough registers to load weight and bias together with x. Persistent blocks load the
// next row while they compute this one, and have weight and bias in shared memory.

#include <algorithm>
#include <climits>
#include <type_traits>

#include <mica/core/cuda/launch.h>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_parameters_cuda.cuh>

namespace mica::kernels::norm_cuda {

namespace {

/// The template arguments of a kernel, and constants that follow from them. A thread has P packs of V columns. The
/// packs of kLanes neighboring lanes are adjacent.
template <class N_, class T_, class W_, int V_, RowKernel kShape, Schedule kSchedule>
struct RegisterShape {
  using N = N_;
  using T = T_;
  using W = W_;
  using S = Accumulate<T>;
  static constexpr Group kGroup = kShape.group;
  static constexpr int kLanes = kShape.lanes;
  static constexpr int V = V_;
  static constexpr int P = kShape.packs;
  static constexpr bool kWarps = has_warps(kGroup);
  static constexpr bool kPersistent = kSchedule == Schedule::persistent;
  static constexpr bool kSingleWave = kSchedule == Schedule::single_wave;
  static constexpr bool kAdds = N::kAdds;
  static constexpr int kStep = kLanes * V;                            // columns from one pack of a thread to the next
  static constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row, per thread
  static constexpr bool kShares = V > 1 && shares_parameters(N::kCentered, kAdds, sizeof(T), sizeof(W));

  // Persistent blocks have the parameters in shared memory and, except in clusters, compute several rows at once.
  using Parameters = std::conditional_t<
      kPersistent, SharedParameters<W, V, N::kCentered>,
      std::conditional_t<kSingleWave, KeptParameters<W, V, P, kStep, N::kCentered, /*kAtOnce=*/true>,
                         GlobalParameters<W, V, kStep, N::kCentered, N::kCentered && !kAdds ? 8 : 16>>>;

  using Moments = MomentsOf<T, V, N::kCentered>;
  using Threads =
      RowGroup<typename Moments::Value, kGroup, kLanes, kPersistent && kGroup == Group::block, kPersistent ? 2 : 1>;

  // The most threads per block.
  static constexpr int kMostThreads = !kWarps                                 ? kForwardBlock / 2
                                      : kPersistent && kGroup == Group::block ? kSharingBlock
                                                                              : kForwardBlock;

  // How many blocks of kMostThreads threads must fit on a multiprocessor (__launch_bounds__): as many as possible
  // without spilling registers.
  static constexpr int kLeastBlocks = [] {
    if (sizeof(T) == 8) {
      return 1;
    }
    if (kSingleWave) {
      return kForwardBlock / kMostThreads;
    }
    if (kAdds) {
      return kGroup == Group::block ? 2 : (kBytes <= 32 ? 4 : 3) + (N::kCentered ? 0 : 1);
    }
    if (kGroup == Group::cluster) {
      return N::kCentered && sizeof(W) == 4 ? 1 : 2;
    }
    if (V == 1) {
      return 2;
    }
    if (kGroup == Group::block) {
      return kPersistent ? 1 : sizeof(T) == 2 ? 3 : 2;
    }
    return kPersistent ? 3 : sizeof(T) == 4 ? 6 : 4;
  }();
};

/// The columns that a thread has of a row.
template <class H>
struct Columns {
  int slab = 0;  // the block's first column
  int first;     // the thread's first column
  int end;       // where the row, or the block's slab of it, ends; 0 if the thread has no row

  __device__ Columns(const NormForwardPlan& p, int row_columns, int lane)
      : first((lane / H::kLanes * (H::P * H::kLanes) + lane % H::kLanes) * H::V), end(row_columns) {
    if constexpr (H::kGroup == Group::cluster) {
      slab = cuda::cluster_rank() * p.slab;
      first += slab;
      end = max(slab, min(end, slab + p.slab));
    }
  }

  __device__ bool has(int i) const { return first + i * H::kStep < end; }
  __device__ int packs() const { return (end - first + H::kStep - 1) / H::kStep; }
  __device__ int elements() const { return H::V * max(0, min(H::P, packs())); }
};

/// The rows of a group, from `first` on, `step` apart.
template <class H>
struct Rows {
  // An int is enough if several warps share a row: the index of a block is an int.
  using Index = std::conditional_t<H::kWarps, int, std::int64_t>;

  Index first;
  Index step;

  __device__ Rows(const NormForwardPlan& p, int block) : first(block), step(static_cast<Index>(gridDim.x)) {
    if constexpr (H::kGroup == Group::cluster) {
      first /= p.blocks;
      step /= p.blocks;
    } else if constexpr (H::kGroup != Group::block || H::kPersistent) {
      first = first * p.groups + static_cast<int>(threadIdx.y);
      step *= p.groups;
    }
  }
};

/// A thread's packs of a row, with zeros for absent ones, and the shift that is subtracted from all elements. 16-bit
/// elements remain packed, so that more threads fit on a multiprocessor.
template <class H>
class RegisterRow {
  using N = typename H::N;
  using T = typename H::T;
  using S = typename H::S;
  static constexpr int V = H::V;
  static constexpr int P = H::P;
  static constexpr int kFirst = H::Moments::kFirst;

 public:
  /// `row` is the row's first element. If there is no such row, nothing is loaded.
  __device__ void load_from(const T* row, const Columns<H>& columns, std::uint64_t policy, bool present) {
    load_packs(opaque(row + columns.first), present ? columns.end - columns.first : 0, policy, tile_);
    if constexpr (N::kCentered && !H::kAdds) {
      if (present) {
        constexpr int kLoad = std::min(V, kFirst);
        Pack<T, kFirst> first;
#pragma unroll
        for (int i = 0; i < kFirst; i += kLoad) {
          reinterpret_cast<Pack<T, kLoad>&>(first.at[i]) = load<kLoad>(row + i);
        }
        first_.set(0, first);
      }
    }
  }

  /// Replaces the packs by those of the sum, and writes them. `begin` is the index of the row's first element.
  __device__ void add(const Addends<T>& a, std::int64_t begin, const Columns<H>& columns, std::uint64_t policy) {
    Tile residuals;
    load_packs(a.residual + begin + columns.first, columns.end - columns.first, policy, residuals);
    // Dropout is drawn while the loads are in flight and few registers are in use.
    unsigned kept = 0;  // a bit for each element
    if (a.threshold > 0) {
      static_assert(P * V <= 32);
      const PhiloxKey key = absolute_key(a.key);
#pragma unroll 1
      for (int i = 0; i < P; ++i) {
        kept |= kept_of_pack<V>(begin + columns.first + i * H::kStep, key, a.threshold) << (i * V);
      }
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (columns.has(i)) {
        const int column = columns.first + i * H::kStep;
        S x[V];
        S sum[V];
        unpack(tile_.pack(i), x);
        unpack(residuals.pack(i), sum);
        if (a.x_bias != nullptr) {
          S bias[V];
          unpack(load<V>(a.x_bias + column), bias);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            x[j] += bias[j];
          }
        }
        if (a.threshold > 0) {
          keep_of_pack(x, kept >> (i * V), a.scale);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sum[j] += x[j];
        }
        const Pack<T, V> pack = pack_of<T>(sum);
        store(a.sum + begin + column, pack);
        tile_.set(i, pack);
      }
    }
  }

  /// Computes the shift from the first elements of the row. Call it once: it replaces elements that are not packed by
  /// their differences from the shift.
  __device__ S find_shift(const Columns<H>& columns) {
    if constexpr (!N::kCentered) {
      return 0;
    } else {
      shift_ = H::kAdds ? shift_of_sum() : shift_of(first_.pack(0));
      if constexpr (kInPlace) {
#pragma unroll
        for (int i = 0; i < P; ++i) {
          const S from = columns.has(i) ? shift_ : S(0);
          Pack<T, V> pack = tile_.pack(i);
#pragma unroll
          for (T& x : pack.at) {
            x -= from;
          }
          tile_.set(i, pack);
        }
      }
      return shift_;
    }
  }

  /// Returns the differences of pack i from the shift; zeros if the pack is absent.
  __device__ void differences(int i, const Columns<H>& columns, S (&values)[V]) const {
    unpack(tile_.pack(i), values);
    if constexpr (N::kCentered && !kInPlace) {
      const S from = columns.has(i) ? shift_ : S(0);
#pragma unroll
      for (S& value : values) {
        value -= from;
      }
    }
  }

  /// See RowTile::forget().
  __device__ void forget() { tile_.forget(); }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, S>;
  using Tile = RowTile<T, V, P, /*kPacked=*/true>;

  // Loads the packs that begin in the next `left` columns, with a policy for the L2 cache.
  __device__ static void load_packs(const T* from, int left, [[maybe_unused]] std::uint64_t policy, Tile& tile) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      tile.set(i, Pack<T, V>{});
      if (i * H::kStep < left) {
        if constexpr (sizeof(T) * V == 8) {  // a double
          tile.set(i, load<V>(from + i * H::kStep));
        } else {
          tile.set(i, load_streaming<V>(from + i * H::kStep, policy));
        }
      }
    }
  }

  // The shift of a sum. Only the group's first thread has the first elements.
  __device__ S shift_of_sum() const {
    const Pack<T, V>& mine = tile_.pack(0);
    const S shift = shift_of(reinterpret_cast<const Pack<T, kFirst>&>(mine));
    if constexpr (H::kGroup != Group::block) {
      return __shfl_sync(kAllLanes, shift, 0, H::kLanes);
    } else {
      __shared__ S shared;
      if (threadIdx.x == 0) {
        shared = shift;
      }
      __syncthreads();
      return shared;
    }
  }

  Tile tile_;
  RowTile<T, kFirst, 1, /*kPacked=*/true> first_;
  S shift_ = 0;
};

/// Returns the row's moments in all threads of the group.
template <class H, class S = typename H::S>
__device__ MeanAndSquares<S> find_moments(const RegisterRow<H>& row, const Columns<H>& columns,
                                          const Forward<typename H::T, typename H::W>& a,
                                          typename H::Threads& threads) {
  constexpr bool kCentered = H::N::kCentered;
  constexpr bool kOnePass = H::Moments::kOnePass;
  // Calls f(i, differences) for each of the thread's packs.
  const auto for_packs = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < H::P; ++i) {
      S values[H::V];
      row.differences(i, columns, values);
      f(i, values);
    }
  };
  S sum = 0;
  S squares = 0;
  for_packs([&](int, const S(&values)[H::V]) {
#pragma unroll
    for (const S value : values) {
      if constexpr (kCentered) {
        sum += value;
      }
      if constexpr (!kCentered || kOnePass) {
        squares = fma(value, value, squares);
      }
    }
  });
  if constexpr (!kCentered) {
    return {0, threads.all_reduce({squares}).at[0]};
  } else if constexpr (kOnePass) {
    const auto sums = threads.all_reduce({sum, squares});
    const S mean = sums.at[0] * a.in_row;
    const S about_mean = fma(-sums.at[0], mean, sums.at[1]);
    return {mean, about_mean < 0 ? S(0) : about_mean};
  } else {
    const S count = static_cast<S>(columns.elements());
    const S mean = sum * reciprocal(count);
    for_packs([&](int i, const S(&values)[H::V]) {
      const S from = columns.has(i) ? mean : S(0);
#pragma unroll
      for (const S value : values) {
        squares = fma(value - from, value - from, squares);
      }
    });
    const auto moments = threads.all_reduce({mean, squares, count});
    return {moments.mean, moments.squares};
  }
}

/// Computes a thread's part of a row whose squares overflow, or that is not finite. Threads whose own row is an
/// ordinary one (`mine` is false) take part in the shuffles.
template <class H, class T, class W>
__device__ void normalize_shrunk_row(const Forward<T, W>& a, const T* rows, const NormForwardPlan& p,
                                     typename Rows<H>::Index row, bool mine) {
  using S = typename H::S;
  // Opaque, since otherwise the compiler would keep what it has computed from them in registers until here.
  const int lane = opaque(static_cast<int>(threadIdx.x));
  S eps = a.eps;
  if constexpr (sizeof(S) == 4) {
    asm volatile("" : "+f"(eps));
  }
  if constexpr (!H::kWarps && !H::kPersistent) {
    row = Rows<H>(p, opaque(static_cast<int>(blockIdx.x))).first;
  }
  __syncwarp();  // this lane reads what other lanes have written of a sum
  const Columns<H> columns(p, static_cast<int>(a.columns), lane);
  write_shrunk_row<typename H::N, H::kLanes>(a, rows + (row < a.rows ? row : 0) * a.columns, row, eps, mine,
                                             lane == 0 && columns.slab == 0, [&](const auto& write) {
#pragma unroll 1
                                               for (int i = 0; i < H::P * H::V; ++i) {
                                                 const int column = columns.first + i / H::V * H::kStep + i % H::V;
                                                 if (column < columns.end) {
                                                   write(column);
                                                 }
                                               }
                                             });
}

/// Writes y of a thread's packs. kBoth: weight and bias are known to be present.
template <bool kBoth, class H, class S>
__device__ void write_packs(const RegisterRow<H>& row, const Columns<H>& columns, S mean, S rstd,
                            const typename H::Parameters& parameters, typename H::T* y) {
  constexpr int kPart = H::Parameters::kPart;
  const S offset = -mean * rstd;
#pragma unroll
  for (int i = 0; i < H::P; ++i) {
    if (columns.has(i)) {
      S values[H::V];
      row.differences(i, columns, values);
#pragma unroll
      for (int part = 0; part < H::V; part += kPart) {
        S w[kPart];
        S b[kPart];
        parameters.template at<kBoth>(i, part, w, b, 0);
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          S& value = values[part + j];
          value = H::N::kCentered ? fma(fma(value, rstd, offset), w[j], b[j]) : value * rstd * w[j];
        }
      }
      const Pack<typename H::T, H::V> pack = pack_of<typename H::T>(values);
      if constexpr (sizeof(pack) == 16) {
        store_whole(y + i * H::kStep, pack);
      } else {
        store(y + i * H::kStep, pack);
      }
    }
  }
}

/// Computes a row of `rows` (x, or the sums), which is in its group's registers. kBoth: weight and bias are known to be
/// present. Lanes without a row take part in the shuffles.
template <bool kBoth, class H, class T, class W, class S = typename H::S>
__device__ void normalize_row(const Forward<T, W>& a, const T* rows, const NormForwardPlan& p,
                              RegisterRow<H>& in_registers, const Columns<H>& columns,
                              const typename H::Parameters& parameters, typename H::Threads& threads,
                              typename Rows<H>::Index row) {
  constexpr bool kCentered = H::N::kCentered;
  const S shift = in_registers.find_shift(columns);
  const MeanAndSquares<S> m = find_moments(in_registers, columns, a, threads);
  in_registers.forget();
  const bool overflow = kCentered && !isfinite(m.squares);
  if (kCentered && __any_sync(kAllLanes, overflow)) {
    normalize_shrunk_row<H>(a, rows, p, row, overflow);
    if (H::kLanes == kWarp) {
      return;  // all lanes have the same row
    }
  }
  if ((H::kLanes == kWarp || row < a.rows) && !overflow) {
    const S rstd = rsqrt(m.squares * a.in_row + a.eps);
    if (threadIdx.x == 0 && columns.slab == 0) {
      write_statistics<typename H::N>(a, row, shift + m.mean, mean_rounding(shift, m.mean), rstd, S(1));
    }
    T* const y = opaque(a.y + (row * a.columns + columns.first));
    if (kBoth || parameters.both()) {
      write_packs<true>(in_registers, columns, m.mean, rstd, parameters, y);
    } else {
      write_packs<false>(in_registers, columns, m.mean, rstd, parameters, y);
    }
  }
}

template <class H>
__device__ typename H::Parameters parameters_of(const Forward<typename H::T, typename H::W>& a,
                                                const Columns<H>& columns, [[maybe_unused]] unsigned char* memory) {
  if constexpr (H::kPersistent) {
    const auto of_slab = [&](const auto* parameter) {
      return parameter == nullptr ? nullptr : parameter + columns.slab;
    };
    return {of_slab(a.weight), of_slab(a.bias), columns.first - columns.slab, columns.end - columns.slab, memory};
  } else if constexpr (H::kSingleWave) {
    return {a.weight, a.bias, columns.first, columns.packs()};
  } else {
    return {a.weight, a.bias, columns.first, a.columns};
  }
}

/// Computes the rows of a group, one after another, and loads the next row meanwhile.
template <class H, class T, class W>
__device__ void normalize_rows(const Forward<T, W>& a, const NormForwardPlan& p, const Rows<H>& rows,
                               unsigned char* memory, typename H::Threads& threads) {
  // Computed again for each row, since the registers for them would be spilled.
  const auto columns = [&] {
    return Columns<H>(p, static_cast<int>(a.columns), opaque(static_cast<int>(threadIdx.x)));
  };
  RegisterRow<H> next;
  const auto load = [&](typename Rows<H>::Index row) {
    next.load_from(a.x + row * a.columns, columns(), a.policy, row < a.rows);
  };
  load(rows.first);
  const typename H::Parameters parameters = parameters_of(a, columns(), memory);
  __syncthreads();
#pragma unroll 1
  for (auto row = rows.first; row < a.rows; row += rows.step) {
    RegisterRow<H> in_registers = next;
    load(row + rows.step);
    normalize_row<true>(a, a.x, p, in_registers, columns(), parameters, threads, row);
  }
}

/// Computes one row per group or, if blocks are persistent, one row after another.
template <class H, class N = typename H::N, class T = typename H::T, class W = typename H::W>
__global__ void __launch_bounds__(H::kMostThreads, H::kLeastBlocks)
    norm_forward_registers_kernel(const Forward<T, W> a, const AddendsOf<N, T> addends, const NormForwardPlan p) {
  __shared__ typename H::Threads::Exchange exchange;
  extern __shared__ __align__(16) unsigned char memory[];
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  typename H::Threads threads(exchange, p.blocks);
  const Rows<H> rows(p, static_cast<int>(blockIdx.x));
  if constexpr (H::kPersistent) {
    normalize_rows<H>(a, p, rows, memory, threads);
  } else {
    const bool present = rows.first < a.rows;
    if (H::kGroup == Group::warp && !present) {
      return;  // if rows share a warp, its lanes without a row are needed for shuffles
    }
    const Columns<H> columns(p, H::kLanes == kWarp || present ? static_cast<int>(a.columns) : 0, threadIdx.x);
    const std::int64_t begin = present ? rows.first * a.columns : 0;
    RegisterRow<H> in_registers;
    in_registers.load_from(a.x + begin, columns, a.policy, true);
    const typename H::Parameters parameters = parameters_of(a, columns, memory);
    const T* source = a.x;
    if constexpr (H::kAdds) {
      in_registers.add(addends, begin, columns, a.policy);
      source = addends.sum;
    }
    normalize_row<false>(a, source, p, in_registers, columns, parameters, threads, rows.first);
  }
}

// On the host.

/// The number of persistent blocks to launch. With `wanted` blocks, each group would have a single row.
template <class H, class Kernel>
unsigned persistent_grid(Kernel kernel, const NormForwardPlan& p, const cuda::Launch& launch, std::int64_t bytes,
                         unsigned wanted) {
  if constexpr (H::kGroup == Group::cluster) {
    return std::min<unsigned>(wanted, launch.resident(kernel));
  } else {
    // More blocks balance the load, but each block loads the parameters.
    const bool is_long = H::kGroup == Group::block && p.threads > 128;
    const bool more = bytes > 40 << 20 && !is_long;
    const unsigned most = launch.resident(kernel) * (more ? 4 : 1);
    if (is_long && wanted > most && wanted < 32 * most) {  // about the same number of rows for each block
      const unsigned rows = (wanted + most - 1) / most;
      return (wanted + rows - 1) / rows;
    }
    return std::min(wanted, most);
  }
}

template <class H, class T, class W>
void launch(const Forward<T, W>& a, const AddendsOf<typename H::N, T>& addends, const NormForwardPlan& p) {
  const auto kernel = norm_forward_registers_kernel<H>;
  int shared_bytes = 0;
  if constexpr (H::kPersistent) {
    shared_bytes = H::Parameters::bytes(H::kGroup == Group::cluster ? p.slab : static_cast<int>(a.columns));
  }
  cuda::Launch launch(p.blocks, dim3(p.threads, p.groups), shared_bytes);
  launch.cluster(p.blocks);
  const std::int64_t wanted = (a.rows + p.groups - 1) / p.groups;
  check(wanted <= INT_MAX / 2, "norm: {} rows are too many", a.rows);
  auto blocks = static_cast<unsigned>(wanted);
  if constexpr (H::kPersistent) {
    blocks = persistent_grid<H>(kernel, p, launch, a.rows * a.columns * static_cast<int>(sizeof(T)), blocks);
  }
  constexpr const char* kName = H::kGroup == Group::cluster ? "norm_forward_registers_kernel<cluster>"
                                : H::kPersistent            ? "norm_forward_registers_kernel<persistent>"
                                : H::kSingleWave            ? "norm_forward_registers_kernel<single_wave>"
                                : H::kGroup == Group::block ? "norm_forward_registers_kernel<block>"
                                                            : "norm_forward_registers_kernel<warp>";
  launch.grid(blocks * p.blocks).dependent().run(kernel, kName, a, addends, p);
}

/// Launches the kernel that the plan has chosen.
template <int V, class N, class T, class W>
void launch_in_registers(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  using Aligned = std::conditional_t<N::kAdds, norm_forward_kernels::RegisterSums, norm_forward_kernels::Registers>;
  using Kernels = std::conditional_t<V == 1, norm_forward_kernels::RegisterUnaligned, Aligned>;
  const bool found = Kernels::call(p.shape, [&]<RowKernel kShape>() {
    const auto with = [&]<Schedule kSchedule>() {
      using H = RegisterShape<N, T, W, V, kShape, kSchedule>;
      if constexpr (has_schedule(H::kShares, kShape, kSchedule)) {
        launch<H>(a, addends, p);
      }
    };
    switch (p.schedule) {
      case Schedule::single_wave: return with.template operator()<Schedule::single_wave>();
      case Schedule::many_waves: return with.template operator()<Schedule::many_waves>();
      case Schedule::persistent: return with.template operator()<Schedule::persistent>();
    }
  });
  check(found, "norm: no forward holds {} packs of {} columns a thread", p.shape.packs, V);
}

}  // namespace

}  // namespace mica::kernels::norm_cuda
