#include <algorithm>

#include <mica/core/detail/wrap.h>
#include <mica/core/parallel.h>
#include <mica/ops/matmul/detail/integer_matmul_kernels.h>

namespace mica::kernels {

void integer_matmul(Cpu, const IntegerMatmul& args) {
  const std::int64_t m = args.out.shape()[1], n = args.out.shape()[2], k = args.a.shape()[2];
  on_dtype(IntegerTypes{}, args.out.dtype(), "matmul", [&]<class T>() {
    const T* const a = args.a.data<T>();
    const T* const b = args.b.data<T>();
    T* const out = args.out.data<T>();
    parallel_for(args.out.shape()[0] * m, 1 + 65536 / (n * k + 1), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        T* const to = out + row * n;
        std::fill(to, to + n, T{0});
        for (std::int64_t i = 0; i < k; ++i) {
          const T factor = a[row * k + i];
          const T* const from = b + (row / m * k + i) * n;
          MICA_INDEPENDENT
          for (std::int64_t j = 0; j < n; ++j) {
            to[j] = wrapping_add(to[j], wrapping_mul(factor, from[j]));
          }
        }
      }
    });
  });
}

}  // namespace mica::kernels
