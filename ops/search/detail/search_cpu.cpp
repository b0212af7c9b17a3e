#include <mica/core/parallel.h>
#include <mica/ops/search/detail/search_kernels.h>

namespace mica::kernels {

void search_sorted(Cpu, const SearchSorted& args) {
  const std::int64_t n = args.sorted.shape()[1];
  const std::int64_t m = args.values.shape()[1];
  const bool shared = args.sorted.shape()[0] == 1;
  std::int64_t* const positions = args.positions.data<std::int64_t>();
  on_dtype(NumericTypes{}, args.sorted.dtype(), "searchsorted", [&]<class T>() {
    const T* const sorted = args.sorted.data<T>();
    const T* const values = args.values.data<T>();
    parallel_for(args.values.numel(), 1024, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        positions[i] = position_in(sorted + (shared ? 0 : i / m * n), n, values[i], args.right);
      }
    });
  });
}

}  // namespace mica::kernels
