// Random tensors, the same numbers as on the CPU:
//
//     (seed, offset, thread) ──> Philox4x32-10: 128 bits ──> 2 or 4 neighboring elements, uniform, normal or integers

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/random_kernels.h>
#include <mica/core/philox.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

// One thread per Philox block, which gives kPerBlock neighboring elements.
template <class T, int kPerBlock, class Element>
__global__ void __launch_bounds__(kThreads) random_kernel(T* data, std::int64_t n, PhiloxKey key, Element element) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t first = b * kPerBlock;
  if (first >= n) {
    return;
  }
  const PhiloxBlock block = philox_block(key, static_cast<std::uint64_t>(b));
#pragma unroll
  for (int lane = 0; lane < kPerBlock; ++lane) {
    if (first + lane < n) {
      data[first + lane] = element(block, lane);
    }
  }
}

template <class T, int kPerBlock, class Element>
void fill_from_blocks(const Tensor& x, PhiloxKey key, Element element) {
  const std::int64_t n = x.numel();
  if (n == 0) {
    return;
  }
  constexpr std::int64_t kPerGrid = std::int64_t{kThreads} * kPerBlock;
  const auto blocks = static_cast<unsigned>((n + kPerGrid - 1) / kPerGrid);
  random_kernel<T, kPerBlock><<<blocks, kThreads, 0, cuda::current_stream()>>>(x.data<T>(), n, key, element);
  cuda::check_launch("random_kernel");
}

template <class T>
struct Uniform {
  using Reals = PhiloxReals<Accumulate<T>>;
  __device__ T operator()(const PhiloxBlock& block, int lane) const {
    return half_open<T>(Reals::uniform(block, lane));
  }
};

template <class T>
struct Normal {
  using Reals = PhiloxReals<Accumulate<T>>;
  __device__ T operator()(const PhiloxBlock& block, int lane) const {
    return static_cast<T>(Reals::normal(block, lane));
  }
};

template <class T>
struct Integer {
  std::uint64_t low;
  std::uint64_t range;
  __device__ T operator()(const PhiloxBlock& block, int lane) const {
    const std::uint64_t bits = (std::uint64_t{block.word[2 * lane + 1]} << 32) | block.word[2 * lane];
    return static_cast<T>(low + bounded(bits, range));
  }
};

// The key is passed as an argument, which the launch copies, so the host need not keep it until the kernel runs.
__global__ void store_key_kernel(std::uint64_t* state, std::uint64_t seed, std::uint64_t offset) {
  state[0] = seed;
  state[1] = offset;
}

}  // namespace

void store_key(Cuda, const Tensor& state, PhiloxKey key) {
  auto* const data = reinterpret_cast<std::uint64_t*>(state.data<std::int64_t>());
  store_key_kernel<<<1, 1, 0, cuda::current_stream()>>>(data, key.seed, key.offset);
  cuda::check_launch("store_key_kernel");
}

void fill_uniform(Cuda, const Tensor& x, PhiloxKey key) {
  on_dtype(FloatTypes{}, x.dtype(), "rand",
           [&]<class T>() { fill_from_blocks<T, PhiloxReals<Accumulate<T>>::kPerBlock>(x, key, Uniform<T>{}); });
}

void fill_normal(Cuda, const Tensor& x, PhiloxKey key) {
  on_dtype(FloatTypes{}, x.dtype(), "randn",
           [&]<class T>() { fill_from_blocks<T, PhiloxReals<Accumulate<T>>::kPerBlock>(x, key, Normal<T>{}); });
}

void fill_integers(Cuda, const Tensor& x, PhiloxKey key, std::int64_t low, std::uint64_t range) {
  on_dtype(IntegerTypes{}, x.dtype(), "randint", [&]<class T>() {
    fill_from_blocks<T, 2>(x, key, Integer<T>{.low = static_cast<std::uint64_t>(low), .range = range});
  });
}

}  // namespace mica::kernels
