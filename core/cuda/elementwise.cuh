#pragma once

// Element-wise kernels; core/elementwise_cpu.h has the same function for the CPU. Included by .cu files only.
//
// Two kernels serve every function. `packed_kernel` gives each thread 16 bytes of adjacent elements, moved in one
// access; `strided_kernel` gives it one element, at any offset. Both use 32-bit indices; the host splits larger
// tensors into parts.

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/core/strided.h>

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

  __device__ void locate(std::uint32_t unit, std::int32_t (&offsets)[N]) const {
#pragma unroll
    for (int t = 0; t < N; ++t) {
      offsets[t] = 0;
    }
    for (int axis = rank - 1; axis > 0; --axis) {
      const std::uint32_t next = sizes[axis].quotient(unit);
      const auto index = static_cast<std::int32_t>(unit - next * sizes[axis].divisor);
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
  }
};

/// One input: a tensor's elements, or a number where `data` is null.
template <class T>
struct Input {
  const T* data = nullptr;
  Accumulate<T> number{};
  bool splat = false;  // packed kernel: one element for the whole pack

  __device__ Accumulate<T> load(std::int32_t offset) const {
    return data != nullptr ? static_cast<Accumulate<T>>(data[offset]) : number;
  }

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
      const auto pack = *reinterpret_cast<const Pack<T, V>*>(data + offset);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        result.at[i] = static_cast<Accumulate<T>>(pack.at[i]);
      }
    }
    return result;
  }
};

/// `last` is the number of elements in the last pack; it may be less than V only if the layout has one axis.
template <int V, class F, class Out, class... In>
__global__ void __launch_bounds__(kElementwiseThreads)
    packed_kernel(F f, Layout<sizeof...(In) + 1> layout, int last, Out* out, Input<In>... in) {
  const std::uint32_t unit = blockIdx.x * kElementwiseThreads + threadIdx.x;
  if (unit >= layout.units) {
    return;
  }
  std::int32_t offsets[sizeof...(In) + 1];
  layout.locate(unit, offsets);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    if (unit + 1 == layout.units && last < V) {
      for (int i = 0; i < last; ++i) {
        out[offsets[0] + i] = static_cast<Out>(f(in.load(offsets[I + 1] + (in.splat ? 0 : i))...));
      }
      return;
    }
    Pack<Out, V> result;
    [&](const auto&... loaded) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        result.at[i] = static_cast<Out>(f(loaded.at[i]...));
      }
    }(in.template load_pack<V>(offsets[I + 1])...);
    *reinterpret_cast<Pack<Out, V>*>(out + offsets[0]) = result;
  }
  (std::make_index_sequence<sizeof...(In)>());
}

template <class F, class Out, class... In>
__global__ void __launch_bounds__(kElementwiseThreads)
    strided_kernel(F f, Layout<sizeof...(In) + 1> layout, Out* out, Input<In>... in) {
  const std::uint32_t unit = blockIdx.x * kElementwiseThreads + threadIdx.x;
  if (unit >= layout.units) {
    return;
  }
  std::int32_t offsets[sizeof...(In) + 1];
  layout.locate(unit, offsets);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    out[offsets[0]] = static_cast<Out>(f(in.load(offsets[I + 1])...));
  }
  (std::make_index_sequence<sizeof...(In)>());
}

/// The number of blocks for `units` threads.
inline unsigned elementwise_blocks(std::uint32_t units) {
  return (units + kElementwiseThreads - 1) / kElementwiseThreads;
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

/// The layout of a loop that fits in 32 bits, in packs of V elements along the last axis (1: in elements).
template <int N>
Layout<N> layout_of(const StridedLoop<N>& loop, int pack = 1) {
  Layout<N> layout;
  layout.rank = loop.rank;
  const int last = loop.rank - 1;
  const std::int64_t inner = (loop.sizes[last] + pack - 1) / pack;
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

/// out[i] = f(in[i]...) over all elements. Inputs are Tensors, which broadcast to out's shape, or numbers. Out and In
/// are the element types; f, callable on the device, sees 16-bit floats as float.
template <class Out, class... In, class F, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cuda, F f, const Tensor& out, const T&... in) {
  constexpr int kTensors = sizeof...(In) + 1;
  constexpr int kPack = static_cast<int>(16 / std::max({sizeof(Out), sizeof(In)...}));
  if (out.numel() == 0) {
    return;
  }
  const std::array<Operand, kTensors> operands{Operand(out), Operand(in)...};
  std::array<const Tensor*, kTensors> tensors{};
  for (int t = 0; t < kTensors; ++t) {
    tensors[t] = operands[t].tensor;
  }
  const StridedLoop<kTensors> loop(out.shape(), tensors);
  Out* const out_start = out.data<Out>();

  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const std::tuple<const In*...> in_starts{
        operands[I + 1].tensor != nullptr ? operands[I + 1].tensor->template data<In>() : nullptr...};
    const auto run = [&](const StridedLoop<kTensors>& part, const std::array<std::int64_t, kTensors>& starts) {
      Out* const out_data = out_start + starts[0];
      const std::tuple<cuda::Input<In>...> inputs{
          cuda::Input<In>{.data = std::get<I>(in_starts) != nullptr ? std::get<I>(in_starts) + starts[I + 1] : nullptr,
                          .number = static_cast<Accumulate<In>>(operands[I + 1].scalar),
                          .splat = part.inner_stride(static_cast<int>(I) + 1) == 0}...};
      const bool packed =
          kPack > 1 && cuda::can_pack(part, 0, out_data, kPack, sizeof(Out), false) &&
          (cuda::can_pack(part, static_cast<int>(I) + 1, std::get<I>(inputs).data, kPack, sizeof(In), true) && ...);
      const cudaStream_t stream = cuda::current_stream();
      if (packed) {
        const auto layout = cuda::layout_of(part, kPack);
        const int rest = static_cast<int>(part.inner_size() % kPack);
        cuda::packed_kernel<kPack, F, Out, In...>
            <<<cuda::elementwise_blocks(layout.units), cuda::kElementwiseThreads, 0, stream>>>(
                f, layout, rest == 0 ? kPack : rest, out_data, std::get<I>(inputs)...);
      } else {
        const auto layout = cuda::layout_of(part);
        cuda::strided_kernel<F, Out, In...>
            <<<cuda::elementwise_blocks(layout.units), cuda::kElementwiseThreads, 0, stream>>>(f, layout, out_data,
                                                                                               std::get<I>(inputs)...);
      }
      cuda::check_launch("elementwise");
    };
    cuda::for_each_part(loop, {}, run);
  }
  (std::make_index_sequence<sizeof...(In)>());
}

}  // namespace mica
