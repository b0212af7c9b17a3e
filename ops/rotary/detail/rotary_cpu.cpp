#include <cmath>

#include <mica/core/parallel.h>
#include <mica/ops/rotary/detail/rotary_kernels.h>

namespace mica::kernels {

void rotary(Cpu, const Rotary& args) {
  const auto half = static_cast<std::int64_t>(args.frequencies.size());
  const std::int64_t* const positions = args.positions.data_or_null<std::int64_t>();
  const std::int64_t position_count = positions != nullptr ? args.positions.numel() : 0;
  on_dtype(FloatTypes{}, args.x.dtype(), "rotary", [&]<class T>() {
    using S = Accumulate<T>;
    const T* const x = args.x.data<T>();
    T* const y = args.y.data<T>();
    parallel_for(args.rows, 1 + 4096 / (args.heads * half), [&](std::int64_t begin, std::int64_t end) {
      S cosines[kMostRotaryPairs];
      S sines[kMostRotaryPairs];
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t position =
            positions != nullptr ? positions[row % position_count] : args.offset + row % args.steps;
        for (std::int64_t j = 0; j < half; ++j) {
          const double angle = static_cast<float>(position) * args.frequencies[static_cast<std::size_t>(j)];
          cosines[j] = static_cast<S>(args.scale * std::cos(angle));
          sines[j] = static_cast<S>(args.scale * (args.back ? -std::sin(angle) : std::sin(angle)));
        }
        for (std::int64_t head = 0; head < args.heads; ++head) {
          const T* const from = x + (row * args.heads + head) * 2 * half;
          T* const to = y + (row * args.heads + head) * 2 * half;
          MICA_INDEPENDENT
          for (std::int64_t j = 0; j < half; ++j) {
            const S a = static_cast<S>(from[j]);
            const S b = static_cast<S>(from[j + half]);
            to[j] = static_cast<T>(a * cosines[j] - b * sines[j]);
            to[j + half] = static_cast<T>(b * cosines[j] + a * sines[j]);
          }
        }
      }
    });
  });
}

}  // namespace mica::kernels
