#include <algorithm>

#include <mica/core/detail/random_kernels.h>
#include <mica/core/parallel.h>
#include <mica/core/philox.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kGrain = 2048;  // blocks

// Sets every element to element(block, lane), with one Philox block per `per_block` elements.
template <class T, class Element>
void fill_from_blocks(const Tensor& x, PhiloxKey key, int per_block, Element element) {
  check_host_key(key);
  T* const data = x.data<T>();
  const std::int64_t n = x.numel();
  parallel_for((n + per_block - 1) / per_block, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const PhiloxBlock block = philox_block(key, static_cast<std::uint64_t>(b));
      const int lanes = static_cast<int>(std::min<std::int64_t>(per_block, n - b * per_block));
      for (int lane = 0; lane < lanes; ++lane) {
        data[b * per_block + lane] = element(block, lane);
      }
    }
  });
}

}  // namespace

void fill_uniform(Cpu, const Tensor& x, PhiloxKey key) {
  on_dtype(FloatTypes{}, x.dtype(), "rand", [&]<class T>() {
    using Reals = PhiloxReals<Accumulate<T>>;
    fill_from_blocks<T>(x, key, Reals::kPerBlock,
                        [](const PhiloxBlock& block, int lane) { return half_open<T>(Reals::uniform(block, lane)); });
  });
}

void fill_normal(Cpu, const Tensor& x, PhiloxKey key) {
  on_dtype(FloatTypes{}, x.dtype(), "randn", [&]<class T>() {
    using Reals = PhiloxReals<Accumulate<T>>;
    fill_from_blocks<T>(x, key, Reals::kPerBlock,
                        [](const PhiloxBlock& block, int lane) { return static_cast<T>(Reals::normal(block, lane)); });
  });
}

void fill_integers(Cpu, const Tensor& x, PhiloxKey key, std::int64_t low, std::uint64_t range) {
  on_dtype(IntegerTypes{}, x.dtype(), "randint", [&]<class T>() {
    fill_from_blocks<T>(x, key, 2, [=](const PhiloxBlock& block, int lane) {
      const std::uint64_t bits = (std::uint64_t{block.word[2 * lane + 1]} << 32) | block.word[2 * lane];
      return static_cast<T>(static_cast<std::uint64_t>(low) + bounded(bits, range));
    });
  });
}

}  // namespace mica::kernels
