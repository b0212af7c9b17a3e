#include <algorithm>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/sort/detail/sort_kernels.h>
#include <mica/ops/sort/detail/sort_key.h>

namespace mica::kernels {

namespace {

struct Entry {
  std::uint64_t key;
  std::int64_t index;

  // Comparing the indices of equal keys, too, makes the sort stable.
  bool operator<(const Entry& other) const { return key != other.key ? key < other.key : index < other.index; }
};

}  // namespace

void argsort(Cpu, const Argsort& args) {
  const std::int64_t n = args.x.shape()[1];
  const std::int64_t k = args.indices.shape()[1];
  std::int64_t* const indices = args.indices.data<std::int64_t>();
  on_dtype(AllTypes{}, args.x.dtype(), "sort", [&]<class T>() {
    const T* const x = args.x.data<T>();
    parallel_for(args.x.shape()[0], 1 + 4096 / n, [&](std::int64_t begin, std::int64_t end) {
      std::vector<Entry> row(static_cast<std::size_t>(n));
      for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t i = 0; i < n; ++i) {
          row[static_cast<std::size_t>(i)] = {sort_key(x[r * n + i], args.descending), i};
        }
        // Selecting the first k and then sorting them is faster than partial_sort, which uses a heap.
        if (k < n) {
          std::nth_element(row.begin(), row.begin() + k, row.end());
        }
        std::sort(row.begin(), row.begin() + k);
        for (std::int64_t i = 0; i < k; ++i) {
          indices[r * k + i] = row[static_cast<std::size_t>(i)].index;
        }
      }
    });
  });
}

}  // namespace mica::kernels
