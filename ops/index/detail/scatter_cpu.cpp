#include <algorithm>
#include <vector>

#include <mica/ops/index/detail/scatter_combine.h>

namespace mica::kernels {

void scatter(Cpu, const Scatter& args) {
  const std::int64_t* const rows = args.rows.data<std::int64_t>();
  on_dtype(AllTypes{}, args.y.dtype(), "scatter", [&]<class T>() {
    const T* const src = args.src.data<T>();
    T* const y = args.y.data<T>();
    const std::int64_t count = args.y.numel();
    std::vector<Combined<T>> values(static_cast<std::size_t>(count));
    std::transform(y, y + count, values.begin(), [](T value) { return static_cast<Combined<T>>(value); });
    for (std::int64_t i = 0; i < args.rows.numel(); ++i) {
      if (rows[i] >= 0 && rows[i] < count) {
        Combined<T>& value = values[static_cast<std::size_t>(rows[i])];
        value = combine(args.combination, value, static_cast<Combined<T>>(src[i]));
      }
    }
    std::transform(values.begin(), values.end(), y, [](Combined<T> value) { return static_cast<T>(value); });
  });
}

}  // namespace mica::kernels
