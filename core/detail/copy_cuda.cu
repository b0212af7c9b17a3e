// Copies that change strides or dtypes; the others are cudaMemcpyAsync.
//
//     src, any strides ──> packs of 4 elements, or single ones ──> converted ──> dst, any strides
//
// copy_packed_kernel serves innermost axes that are contiguous in both tensors (or repeat one element of src),
// copy_strided_kernel all others. copy_many_kernel copies up to 120 contiguous tensors in one launch.

#include <cmath>

#include <mica/core/cuda/elementwise.cuh>
#include <mica/core/detail/copy_kernels.h>
#include <mica/core/detail/sequence.h>
#include <mica/core/detail/wrap.h>

namespace mica::kernels {

namespace {

// Wide enough for full speed between float32 and the 16-bit floats.
constexpr int kPack = 4;

// Calls body.operator()<T>() for the element type T of `dtype`, on the device.
template <class Body>
__device__ void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float64: body.template operator()<double>(); break;
    case DType::float32: body.template operator()<float>(); break;
    case DType::float16: body.template operator()<Float16>(); break;
    case DType::bfloat16: body.template operator()<BFloat16>(); break;
    case DType::int64: body.template operator()<std::int64_t>(); break;
    case DType::int32: body.template operator()<std::int32_t>(); break;
    case DType::uint8: body.template operator()<std::uint8_t>(); break;
    case DType::boolean: body.template operator()<bool>(); break;
  }
}

// The destination's dtype is known at run time only: every thread takes the same branch, and 64 kernels become 8.
template <class From>
__global__ void __launch_bounds__(cuda::kElementwiseThreads)
    copy_packed_kernel(cuda::Layout<2> layout, int last, std::byte* dst, DType to, cuda::Input<From> src) {
  const std::uint32_t unit = blockIdx.x * cuda::kElementwiseThreads + threadIdx.x;
  if (unit >= layout.units) {
    return;
  }
  std::int32_t offsets[2];
  layout.locate(unit, offsets);
  if (unit + 1 == layout.units && last < kPack) {
    with_dtype(to, [&]<class To>() {
      for (int i = 0; i < last; ++i) {
        reinterpret_cast<To*>(dst)[offsets[0] + i] = static_cast<To>(src.load(offsets[1] + (src.splat ? 0 : i)));
      }
    });
    return;
  }
  const auto loaded = src.template load_pack<kPack>(offsets[1]);
  with_dtype(to, [&]<class To>() {
    cuda::Pack<To, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      pack.at[i] = static_cast<To>(loaded.at[i]);
    }
    *reinterpret_cast<cuda::Pack<To, kPack>*>(reinterpret_cast<To*>(dst) + offsets[0]) = pack;
  });
}

template <class From>
__global__ void __launch_bounds__(cuda::kElementwiseThreads)
    copy_strided_kernel(cuda::Layout<2> layout, std::byte* dst, DType to, cuda::Input<From> src) {
  const std::uint32_t unit = blockIdx.x * cuda::kElementwiseThreads + threadIdx.x;
  if (unit >= layout.units) {
    return;
  }
  std::int32_t offsets[2];
  layout.locate(unit, offsets);
  const auto value = src.load(offsets[1]);
  with_dtype(to, [&]<class To>() { reinterpret_cast<To*>(dst)[offsets[0]] = static_cast<To>(value); });
}

// Copies of contiguous tensors, passed as a kernel argument, so at most 4 KiB. Each block copies a part of one tensor.
struct ManyCopies {
  static constexpr int kMost = 120;

  const std::byte* from[kMost];
  std::byte* to[kMost];
  std::int64_t counts[kMost];
  std::int32_t first_block[kMost];
  std::int32_t copies;
};
static_assert(sizeof(ManyCopies) <= 4000);

constexpr int kManyThreads = 256;
constexpr int kPacksEach = 4;  // per thread, read 16 bytes at a time

template <class To, class From>
constexpr std::int64_t kManyElements = kManyThreads* kPacksEach*(16 / static_cast<std::int64_t>(sizeof(From)));

template <class To, class From>
__global__ void __launch_bounds__(kManyThreads) copy_many_kernel(const __grid_constant__ ManyCopies copies) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(From));
  constexpr std::int64_t kElements = kManyElements<To, From>;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  int at = 0;
  for (int beyond = copies.copies; beyond - at > 1;) {
    const int middle = (at + beyond) / 2;
    if (copies.first_block[middle] <= block) {
      at = middle;
    } else {
      beyond = middle;
    }
  }
  const std::int64_t start = (block - copies.first_block[at]) * kElements;
  const std::int64_t left = copies.counts[at] - start;
  const From* const from = reinterpret_cast<const From*>(copies.from[at]) + start;
  To* const to = reinterpret_cast<To*>(copies.to[at]) + start;
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  if (aligned && left >= kElements) {
    cuda::Pack<From, kWidth> loaded[kPacksEach];
#pragma unroll
    for (int k = 0; k < kPacksEach; ++k) {
      loaded[k] = cuda::load<kWidth>(from + (k * kManyThreads + threadIdx.x) * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kPacksEach; ++k) {
      cuda::Pack<To, kWidth> pack;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        pack.at[i] = static_cast<To>(loaded[k].at[i]);
      }
      cuda::store(to + (k * kManyThreads + threadIdx.x) * kWidth, pack);
    }
    return;
  }
  for (std::int64_t i = threadIdx.x; i < (left < kElements ? left : kElements); i += kManyThreads) {
    to[i] = static_cast<To>(from[i]);
  }
}

// From may be a wider type than the tensors' dtype: one From then holds `scale` of their elements.
template <class To, class From>
void launch_copy_many(const Tensors& dst, const Tensors& src, std::int64_t scale) {
  for (std::size_t begin = 0; begin < dst.size();) {
    ManyCopies copies;
    copies.copies = 0;
    std::int64_t blocks = 0;
    for (; begin < dst.size() && copies.copies < ManyCopies::kMost; ++begin) {
      const std::int64_t count = dst[begin].numel() * scale;
      const std::int64_t more = (count + kManyElements<To, From> - 1) / kManyElements<To, From>;
      if (blocks + more > INT32_MAX) {
        mica::check(copies.copies > 0, "copy: {} elements are too many", dst[begin].numel());
        break;
      }
      const int i = copies.copies++;
      copies.from[i] = src[begin].raw_data();
      copies.to[i] = dst[begin].raw_data();
      copies.counts[i] = count;
      copies.first_block[i] = static_cast<std::int32_t>(blocks);
      blocks += more;
    }
    copy_many_kernel<To, From><<<static_cast<unsigned>(blocks), kManyThreads, 0, cuda::current_stream()>>>(copies);
    cuda::check_launch("copy_many_kernel");
  }
}

template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

template <class T>
__global__ void __launch_bounds__(cuda::kElementwiseThreads)
    sequence_kernel(T* x, std::int64_t size, Sequence<T> sequence) {
  const std::int64_t i = std::int64_t{blockIdx.x} * cuda::kElementwiseThreads + threadIdx.x;
  if (i < size) {
    x[i] = sequence(i);
  }
}

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return wrapping_add(a, b);
  }
};

}  // namespace

void copy(Cuda, const Tensor& dst, const Tensor& src) {
  if (dst.numel() == 0) {
    return;
  }
  const cudaStream_t stream = cuda::current_stream();
  if (dst.dtype() == src.dtype() && dst.is_contiguous() && src.is_contiguous()) {
    cuda::check(cudaMemcpyAsync(dst.raw_data(), src.raw_data(), dst.bytes(), cudaMemcpyDeviceToDevice, stream),
                "cudaMemcpyAsync");
    return;
  }
  const StridedLoop<2> loop(dst.shape(), {&dst, &src}, memory_order(dst));
  const DType to = dst.dtype();
  on_dtype(AllTypes{}, src.dtype(), "copy", [&]<class From>() {
    const From* const src_start = src.data<From>();
    cuda::for_each_part(loop, {}, [&](const StridedLoop<2>& part, const std::array<std::int64_t, 2>& starts) {
      std::byte* const dst_data = dst.raw_data() + starts[0] * static_cast<std::int64_t>(size_of(to));
      const cuda::Input<From> input{.data = src_start + starts[1], .number = {}, .splat = part.inner_stride(1) == 0};
      if (cuda::can_pack(part, 0, dst_data, kPack, size_of(to), false) &&
          cuda::can_pack(part, 1, input.data, kPack, sizeof(From), true)) {
        const auto layout = cuda::layout_of(part, kPack);
        const int rest = static_cast<int>(part.inner_size() % kPack);
        copy_packed_kernel<From><<<cuda::elementwise_blocks(layout.units), cuda::kElementwiseThreads, 0, stream>>>(
            layout, rest == 0 ? kPack : rest, dst_data, to, input);
      } else {
        const auto layout = cuda::layout_of(part);
        copy_strided_kernel<From><<<cuda::elementwise_blocks(layout.units), cuda::kElementwiseThreads, 0, stream>>>(
            layout, dst_data, to, input);
      }
      cuda::check_launch("copy");
    });
  });
}

void copy_many(Cuda, const Tensors& dst, const Tensors& src) {
  if (dst.empty()) {
    return;
  }
  const DType to = dst.front().dtype(), from = src.front().dtype();
  if (to == from) {
    const auto size = static_cast<std::int64_t>(size_of(to));
    if (size % 2 == 0) {
      launch_copy_many<std::uint16_t, std::uint16_t>(dst, src, size / 2);
    } else {
      launch_copy_many<std::uint8_t, std::uint8_t>(dst, src, size);
    }
  } else if (from == float16) {
    launch_copy_many<float, Float16>(dst, src, 1);
  } else {
    launch_copy_many<float, BFloat16>(dst, src, 1);
  }
}

void fill(Cuda device, const Tensor& x, double value) {
  // 0, but not -0, is all zero bits in every dtype.
  if (value == 0 && !std::signbit(value) && x.is_contiguous() && x.numel() > 0) {
    cuda::check(cudaMemsetAsync(x.raw_data(), 0, x.bytes(), cuda::current_stream()), "cudaMemsetAsync");
    return;
  }
  on_dtype(AllTypes{}, x.dtype(), "fill", [&]<class T>() {
    elementwise<T>(device, Constant<T>{static_cast<T>(static_cast<Accumulate<T>>(value))}, x);
  });
}

void fill_sequence(Cuda, const Tensor& x, double start, double step) {
  on_dtype(Types<double, std::int64_t>{}, x.dtype(), "arange", [&]<class T>() {
    const std::int64_t blocks = (x.numel() + cuda::kElementwiseThreads - 1) / cuda::kElementwiseThreads;
    mica::check(blocks <= INT32_MAX, "arange: {} elements are too many", x.numel());
    sequence_kernel<T><<<static_cast<unsigned>(blocks), cuda::kElementwiseThreads, 0, cuda::current_stream()>>>(
        x.data<T>(), x.numel(), Sequence<T>{static_cast<T>(start), static_cast<T>(step)});
    cuda::check_launch("sequence_kernel");
  });
}

void add_into(Cuda device, const Tensor& dst, const Tensor& src) {
  on_dtype(NumericTypes{}, dst.dtype(), "add_into",
           [&]<class T>() { elementwise<T, T, T>(device, Sum{}, dst, dst, src); });
}

}  // namespace mica::kernels
