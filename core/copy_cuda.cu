#include <cmath>

#include <mica/core/copy_kernels.h>
#include <mica/core/cuda/elementwise.cuh>
#include <mica/core/wrap.h>

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
    case DType::float16: body.template operator()<Half>(); break;
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

template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

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
  const StridedLoop<2> loop(dst.shape(), {&dst, &src});
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

void add_into(Cuda device, const Tensor& dst, const Tensor& src) {
  on_dtype(NumericTypes{}, dst.dtype(), "add_into",
           [&]<class T>() { elementwise<T, T, T>(device, Sum{}, dst, dst, src); });
}

}  // namespace mica::kernels
