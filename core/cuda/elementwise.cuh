#pragma once

// Element-wise kernels; core/elementwise_cpu.h has the same function for the CPU. Included by .cu files only.
//
//     inputs, any strides ──> packs of 16 bytes, or single elements ──> f ──> outputs
//
// One kernel template serves every function. A thread processes units: packs of adjacent elements, moved in one access
// of 16 bytes, or single elements at any offset. Indices have 32 bits; the host splits larger tensors into parts.

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/strided.h>
#include <mica/core/dispatch.h>

namespace mica {

namespace cuda {

inline constexpr int kElementwiseThreads = 256;

/// Division of numbers below 2³¹ by a constant, as a multiplication and a shift (Granlund and Montgomery, "Division
/// by invariant integers using multiplication", PLDI 1994).
struct Divisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 1;
  std::uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(std::uint32_t d) : divisor(d) {
    while (shift < 32 && (std::uint64_t{1} << shift) < d) {
      ++shift;
    }
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - d)) / d + 1);
  }

  __device__ std::uint32_t quotient(std::uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

/// A StridedLoop as passed to a kernel: maps the number of a unit (an element or a pack) to its offset in each of N
/// tensors. Units are counted along the last axis.
template <int N>
struct Layout {
  std::uint32_t units = 0;
  int rank = 1;
  Divisor sizes[kMaxRank];
  std::int32_t strides[N][kMaxRank] = {};  // in elements

  /// Returns the unit's number along the last axis.
  __device__ std::uint32_t locate(std::uint32_t unit, std::int32_t (&offsets)[N]) const {
    std::uint32_t inner = unit;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      offsets[t] = 0;
    }
    for (int axis = rank - 1; axis > 0; --axis) {
      const std::uint32_t next = sizes[axis].quotient(unit);
      const auto index = static_cast<std::int32_t>(unit - next * sizes[axis].divisor);
      inner = axis == rank - 1 ? static_cast<std::uint32_t>(index) : inner;
      unit = next;
#pragma unroll
      for (int t = 0; t < N; ++t) {
        offsets[t] += index * strides[t][axis];
      }
    }
#pragma unroll
    for (int t = 0; t < N; ++t) {
      offsets[t] += static_cast<std::int32_t>(unit) * strides[t][0];
    }
    return inner;
  }

  /// Advances from unit `inner` by `step` units along the last axis, without divisions. False if the row ends first.
  __device__ bool advance(std::uint32_t& inner, std::uint32_t step, const std::int32_t (&from)[N],
                          std::int32_t (&offsets)[N]) const {
    if (inner + step >= sizes[rank - 1].divisor) {
      return false;
    }
    inner += step;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      offsets[t] = from[t] + static_cast<std::int32_t>(step) * strides[t][rank - 1];
    }
    return true;
  }

  /// For a layout whose units are runs of `length` elements, with strides in elements: the offsets of elements
  /// `first`, first + step, … of run number `run`. Returns the number of elements of the run; the last run of a row
  /// has `last`.
  template <int U>
  __device__ std::uint32_t locate_in_run(std::uint32_t run, int length, int last, std::uint32_t first, int step,
                                         std::int32_t (&offsets)[U][N]) const {
    std::int32_t begin[N];
    const std::uint32_t inner = locate(run, begin);
    const auto skipped = static_cast<std::int32_t>(inner * (length - 1) + first);
#pragma unroll
    for (int t = 0; t < N; ++t) {
      const std::int32_t stride = strides[t][rank - 1];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        offsets[u][t] = begin[t] + (skipped + u * step) * stride;
      }
    }
    return inner + 1 < sizes[rank - 1].divisor ? length : last;
  }
};

/// One input: a tensor's elements or, if `data` is null, a number.
template <class T>
struct Input {
  const T* data = nullptr;
  Accumulate<T> number{};
  bool splat = false;  // packed kernel: one element for the whole pack

  __device__ Accumulate<T> load(std::int32_t offset) const {
    return data != nullptr ? static_cast<Accumulate<T>>(data[offset]) : number;
  }

  /// V elements from `offset` on.
  template <int V>
  __device__ Pack<Accumulate<T>, V> load_pack(std::int32_t offset) const {
    Pack<Accumulate<T>, V> result;
    if (data == nullptr || splat) {
      const Accumulate<T> value = load(offset);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        result.at[i] = value;
      }
    } else {
      unpack(cuda::load<V>(data + offset), result.at);
    }
    return result;
  }

  /// Loads V adjacent elements (or one, if V = 1) of a tensor in their stored type. They bypass the L1 cache, and use
  /// `policy` in the L2 cache.
  template <int V>
  __device__ Pack<T, V> load_once(std::int32_t offset, std::uint64_t policy) const {
    if constexpr (sizeof(Pack<T, V>) == 16) {
      return load_streaming<V>(data + offset, policy);
    } else {
      return cuda::load<V>(data + offset);
    }
  }
};

/// Where a function's results are written; null: nowhere.
template <class T, int kCount>
struct Outputs {
  T* data[kCount];
};

/// Whether F declares kReadsOnce: its inputs are tensors that no output overlaps, and are mostly read once. Then they
/// bypass the L1 cache, and a thread loads several units at a time. Broadcast inputs are read one element at a time.
template <class F>
constexpr bool reads_once() {
  return requires { F::kReadsOnce; };
}
template <class F, class Out, int V, bool kRuns>
constexpr int units_per_thread() {
  return !reads_once<F>() || sizeof(Out) == 8 ? 1 : V > 1 ? 2 : kRuns ? 16 / static_cast<int>(sizeof(Out)) : 4;
}
/// The minimum number of resident blocks per multiprocessor, for launch bounds: as many as the units' registers allow.
template <class F, class Out, int V, bool kRuns, int kOuts>
constexpr int least_blocks() {
  return !reads_once<F>() || sizeof(Out) == 8 ? 1 : V > 1 ? 5 : !kRuns ? 6 : kOuts == 1 ? 4 : 3;
}
/// Whether the units of a warp may be combined into one run along the last axis, if rows are long enough. This saves
/// time because locating an element takes longer than moving it.
template <class F, class Out, int V>
constexpr bool may_run() {
  return V == 1 && units_per_thread<F, Out, V, true>() > 1;
}

/// The units of one input that a thread has loaded. Keeping them in their stored type takes the fewest registers.
template <class In, int V, int U, bool kReadOnce>
struct Units {
  using Held = Pack<std::conditional_t<kReadOnce, In, Accumulate<In>>, V>;
  Held at[U];

  __device__ void load(int u, const Input<In>& in, std::int32_t offset, std::uint64_t policy) {
    if constexpr (kReadOnce) {
      at[u] = in.template load_once<V>(offset, policy);
    } else {
      at[u] = in.template load_pack<V>(offset);
    }
  }
  __device__ Pack<Accumulate<In>, V> values(int u) const {
    Pack<Accumulate<In>, V> result;
    unpack(at[u], result.at);
    return result;
  }
};

/// out[k][i] = f(in[i]...)[k]. A unit has V elements, but the last one has `last`, which can be less than V only if the
/// layout has one axis. If the layout counts runs of units, the last run of each row has `last` units.
template <int V, bool kRuns, class F, class Out, int kOuts, class... In>
__global__ void __launch_bounds__(kElementwiseThreads, (least_blocks<F, Out, V, kRuns, kOuts>()))
    elementwise_kernel(F f, Layout<kOuts + sizeof...(In)> layout, int last, Outputs<Out, kOuts> out, Input<In>... in) {
  constexpr bool kReadOnce = reads_once<F>();
  constexpr int U = units_per_thread<F, Out, V, kRuns>();
  constexpr int kRun = kRuns ? kWarp * U : 1;
  constexpr std::uint32_t kStep = kRun > 1 ? kWarp : kElementwiseThreads;  // from one unit of a thread to its next one
  constexpr int kUnitBytes = kRun * V * static_cast<int>((sizeof(In) + ... + 0));
  const std::uint64_t policy = kReadOnce ? read_once_policy(std::int64_t{kUnitBytes} * layout.units) : 0;
  std::int32_t offsets[U][kOuts + sizeof...(In)];
  std::uint32_t first = 0;
  std::uint32_t whole = 0;  // units of V elements
  std::uint32_t inner = 0;
  if constexpr (kRun > 1) {
    const std::uint32_t run = (blockIdx.x * kElementwiseThreads + threadIdx.x) / kWarp;
    first = threadIdx.x % kWarp;
    if (run < layout.units) {
      whole = layout.locate_in_run(run, kRun, last, first, kWarp, offsets);
    }
  } else {
    first = blockIdx.x * (kElementwiseThreads * U) + threadIdx.x;
    whole = layout.units - (last < V);
  }
  [&]<std::size_t... I>(std::index_sequence<I...>, auto... units) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const std::uint32_t unit = first + u * kStep;
      if (kRun == 1 && unit < layout.units &&
          (u == 0 || !layout.advance(inner, kStep, offsets[u == 0 ? 0 : u - 1], offsets[u]))) {
        inner = layout.locate(unit, offsets[u]);
      }
      if (unit < whole) {
        (units.load(u, in, offsets[u][kOuts + I], policy), ...);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const std::uint32_t unit = first + u * kStep;
      if (unit < whole) {
        decltype(f(in.number...)) returned[V];
        [&](const auto&... values) {
#pragma unroll
          for (int i = 0; i < V; ++i) {
            returned[i] = f(values.at[i]...);
          }
        }(units.values(u)...);
#pragma unroll
        for (int k = 0; k < kOuts; ++k) {
          if (kOuts == 1 || out.data[k] != nullptr) {
            std::remove_cvref_t<decltype(result_of(returned[0], k))> results[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
              results[i] = result_of(returned[i], k);
            }
            store(out.data[k] + offsets[u][k], pack_of<Out>(results));
          }
        }
      } else if (V > 1 && unit < layout.units) {
#pragma unroll 1
        for (int i = 0; i < last; ++i) {
          const auto returned = f(in.load(offsets[u][kOuts + I] + (in.splat ? 0 : i))...);
          for (int k = 0; k < kOuts; ++k) {
            if (out.data[k] != nullptr) {
              out.data[k][offsets[u][k] + i] = static_cast<Out>(result_of(returned, k));
            }
          }
        }
      }
    }
  }
  (std::index_sequence_for<In...>(), Units<In, V, U, kReadOnce>{}...);
}

/// The number of blocks for `units` units, or runs of `run` units, if a thread processes `per_thread` of them.
inline unsigned elementwise_blocks(std::uint32_t units, int per_thread = 1, int run = 1) {
  const std::uint32_t in_block = kElementwiseThreads * per_thread / run;
  return (units + in_block - 1) / in_block;
}

/// The distance that the loop's steps along an axis span in tensor t, in elements.
template <int N>
std::int64_t reach(const StridedLoop<N>& loop, int t, int axis) {
  const std::int64_t stride = loop.strides[t][axis];
  return (loop.sizes[axis] - 1) * (stride < 0 ? -stride : stride);
}

/// Whether the number of every element and every offset fit in 31 bits.
template <int N>
bool fits_32_bits(const StridedLoop<N>& loop) {
  bool fits = loop.numel <= INT32_MAX;
  for (int t = 0; t < N; ++t) {
    std::int64_t extent = 0;
    for (int axis = 0; axis < loop.rank; ++axis) {
      extent += reach(loop, t, axis);
    }
    fits = fits && extent <= INT32_MAX;
  }
  return fits;
}

/// Calls run(part, starts) for parts of the loop that fit in 32 bits; starts[t] is the offset of the part in tensor t,
/// in elements.
template <int N, class Run>
void for_each_part(const StridedLoop<N>& loop, const std::type_identity_t<std::array<std::int64_t, N>>& starts,
                   const Run& run) {
  if (fits_32_bits(loop)) {
    run(loop, starts);
    return;
  }
  // Halve the axis with the largest span.
  int longest = 0;
  std::int64_t most = 0;
  for (int axis = 0; axis < loop.rank; ++axis) {
    for (int t = 0; t < N; ++t) {
      const std::int64_t length = reach(loop, t, axis) + loop.sizes[axis];
      if (length > most) {
        most = length;
        longest = axis;
      }
    }
  }
  const std::int64_t whole = loop.sizes[longest];
  StridedLoop<N> part = loop;
  part.sizes[longest] = whole / 2;
  part.numel = loop.numel / whole * part.sizes[longest];
  for_each_part(part, starts, run);

  std::array<std::int64_t, N> middle = starts;
  for (int t = 0; t < N; ++t) {
    middle[t] += part.sizes[longest] * loop.strides[t][longest];
  }
  part.sizes[longest] = whole - whole / 2;
  part.numel = loop.numel / whole * part.sizes[longest];
  for_each_part(part, middle, run);
}

/// The layout of a loop that fits in 32 bits, in packs of V elements along the last axis (1: in elements), or in runs
/// of packs.
template <int N>
Layout<N> layout_of(const StridedLoop<N>& loop, int pack = 1, int run = 1) {
  Layout<N> layout;
  layout.rank = loop.rank;
  const int last = loop.rank - 1;
  const std::int64_t inner = (loop.sizes[last] + pack * run - 1) / (pack * run);
  layout.units = static_cast<std::uint32_t>(loop.numel / std::max<std::int64_t>(loop.sizes[last], 1) * inner);
  for (int axis = 0; axis < loop.rank; ++axis) {
    layout.sizes[axis] = Divisor(static_cast<std::uint32_t>(axis == last ? inner : loop.sizes[axis]));
    for (int t = 0; t < N; ++t) {
      // On an axis of length 1 the stride may exceed 32 bits, but it is never multiplied by anything.
      const std::int64_t stride = loop.strides[t][axis] * (axis == last ? pack : 1);
      layout.strides[t][axis] = loop.sizes[axis] > 1 ? static_cast<std::int32_t>(stride) : 0;
    }
  }
  return layout;
}

/// Whether tensor t of a loop can be moved in packs of `pack` elements of `size` bytes, from `data` on: adjacent along
/// the last axis, and packs aligned. With `splat`, a stride of 0 along the last axis is allowed, too.
template <int N>
bool can_pack(const StridedLoop<N>& loop, int t, const void* data, int pack, std::size_t size, bool splat) {
  const int last = loop.rank - 1;
  if (splat && loop.strides[t][last] == 0) {
    return true;
  }
  if (loop.strides[t][last] != 1 ||
      reinterpret_cast<std::uintptr_t>(data) % std::min<std::size_t>(pack * size, 16) != 0) {
    return false;
  }
  for (int axis = 0; axis < last; ++axis) {
    if (loop.strides[t][axis] % pack != 0) {
      return false;
    }
  }
  return loop.rank == 1 || loop.sizes[last] % pack == 0;
}

}  // namespace cuda

/// out[k][i] = f(in[i]...)[k] over all elements, for f that returns kOuts Results, or one number. A null output is not
/// written. Outputs have the same shape; inputs are Tensors, which broadcast to it, or numbers. Out and In are the
/// element types; f, callable on the device, sees 16-bit floats as float.
template <class Out, class... In, class F, std::size_t kOutputs, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cuda, F f, const std::array<const Tensor*, kOutputs>& outs,
                                                         const T&... in) {
  constexpr int kOuts = static_cast<int>(kOutputs);
  constexpr int kTensors = kOuts + sizeof...(In);
  constexpr int kPack = static_cast<int>(16 / std::max({sizeof(Out), sizeof(In)...}));
  const Tensor& some = *first_output(outs);
  if (some.numel() == 0) {
    return;
  }
  const std::array<Operand, sizeof...(In)> operands{Operand(in)...};
  std::array<const Tensor*, kTensors> tensors{};
  for (int k = 0; k < kOuts; ++k) {
    tensors[k] = outs[k];
  }
  [[maybe_unused]] int next = kOuts;
  ((tensors[next++] = Operand(in).tensor), ...);
  const StridedLoop<kTensors> loop(some.shape(), tensors, memory_order(some));

  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto run = [&](const StridedLoop<kTensors>& part, const std::array<std::int64_t, kTensors>& starts) {
      const std::tuple<cuda::Input<In>...> inputs{cuda::Input<In>{
          .data = operands[I].tensor != nullptr ? operands[I].tensor->template data<In>() + starts[kOuts + I] : nullptr,
          .number = static_cast<Accumulate<In>>(operands[I].scalar),
          .splat = part.inner_stride(kOuts + static_cast<int>(I)) == 0}...};
      cuda::Outputs<Out, kOuts> outputs{};
      bool packed = kPack > 1 && (cuda::can_pack(part, kOuts + static_cast<int>(I), std::get<I>(inputs).data, kPack,
                                                 sizeof(In), !cuda::reads_once<F>()) &&
                                  ...);
      for (int k = 0; k < kOuts; ++k) {
        if (outs[k] != nullptr) {
          outputs.data[k] = outs[k]->template data<Out>() + starts[k];
          packed = packed && cuda::can_pack(part, k, outputs.data[k], kPack, sizeof(Out), false);
        }
      }
      const auto launch = [&]<int V, bool kRuns>() {
        constexpr int kUnits = cuda::units_per_thread<F, Out, V, kRuns>();
        constexpr int kRun = kRuns ? cuda::kWarp * kUnits : 1;
        const auto layout = cuda::layout_of(part, V, kRun);
        const int rest = static_cast<int>(part.inner_size() % (V * kRun));
        cuda::elementwise_kernel<V, kRuns, F, Out, kOuts, In...>
            <<<cuda::elementwise_blocks(layout.units, kUnits, kRun), cuda::kElementwiseThreads, 0,
               cuda::current_stream()>>>(f, layout, rest == 0 ? V * kRun : rest, outputs, std::get<I>(inputs)...);
      };
      if (packed) {
        launch.template operator()<kPack, false>();
      } else if (cuda::may_run<F, Out, 1>() && part.inner_size() >= cuda::kWarp * 8) {
        launch.template operator()<1, cuda::may_run<F, Out, 1>()>();
      } else {
        launch.template operator()<1, false>();
      }
      cuda::check_launch("elementwise");
    };
    cuda::for_each_part(loop, {}, run);
  }
  (std::make_index_sequence<sizeof...(In)>());
}

/// out[i] = f(in[i]...) over all elements.
template <class Out, class... In, class F, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cuda device, F f, const Tensor& out, const T&... in) {
  elementwise<Out, In...>(device, f, std::array<const Tensor*, 1>{&out}, in...);
}

}  // namespace mica
