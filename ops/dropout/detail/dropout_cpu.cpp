#include <algorithm>

#include <mica/core/parallel.h>
#include <mica/ops/dropout/detail/dropout_kernels.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kBlocks = 16;  // Philox blocks that are computed together, so that the rounds vectorize
constexpr std::int64_t kElements = detail::kDropoutGroup * kBlocks;
constexpr std::int64_t kGrain = 64;  // the fewest runs of kElements per thread

template <class T>
void drop(const Dropout& args) {
  const T* const x = args.x.data<T>();
  T* const y = args.y.data<T>();
  const std::int64_t n = args.x.numel();
  const std::uint32_t threshold = args.dropout.threshold;
  const PhiloxKey key = args.dropout.key;
  check_host_key(key);
  const auto scale = static_cast<Accumulate<T>>(args.dropout.scale());

  parallel_for((n + kElements - 1) / kElements, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      bool kept[kElements];
      MICA_INDEPENDENT
      for (std::int64_t b = 0; b < kBlocks; ++b) {
        const PhiloxBlock bits = detail::draw_dropout_group(key, static_cast<std::uint64_t>(chunk * kBlocks + b));
        for (int i = 0; i < detail::kDropoutGroup; ++i) {
          kept[detail::kDropoutGroup * b + i] = detail::is_kept(bits, i, threshold);
        }
      }
      const std::int64_t first = chunk * kElements;
      const std::int64_t count = std::min(kElements, n - first);
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < count; ++i) {
        const auto value = static_cast<Accumulate<T>>(x[first + i]) * scale;
        y[first + i] = static_cast<T>(kept[i] ? value : Accumulate<T>{0});
      }
    }
  });
}

}  // namespace

void dropout(Cpu, const Dropout& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "dropout", [&]<class T>() { drop<T>(args); });
}

}  // namespace mica::kernels
