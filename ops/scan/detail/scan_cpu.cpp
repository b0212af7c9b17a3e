#include <mica/core/parallel.h>
#include <mica/ops/scan/detail/scan_kernels.h>

namespace mica::kernels {

void cumsum(Cpu, const Cumsum& args) {
  const std::int64_t n = args.x.shape()[1];
  on_dtype(ScannedTypes{}, args.x.dtype(), "cumsum", [&]<class T>() {
    // Integers are added as unsigned ones, which wrap around; overflow of signed ones would be undefined behavior.
    // Floats are added in double: float would lose the small terms of a long sum.
    using S = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
    const T* const x = args.x.data<T>();
    T* const y = args.y.data<T>();
    parallel_for(args.x.shape()[0], 1 + 16384 / n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        S sum = 0;
        for (std::int64_t j = 0; j < n; ++j) {
          const std::int64_t at = r * n + (args.reverse ? n - 1 - j : j);
          sum += static_cast<S>(x[at]);
          y[at] = static_cast<T>(sum);
        }
      }
    });
  });
}

}  // namespace mica::kernels
