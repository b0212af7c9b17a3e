// Elements that are combined by destination, without atomics:
//
//     rows ──> sorted, with their positions ──> runs of equal rows ──> scan that starts anew at each run
//                                                                       └──> the last of each run ──> y

#include <mica/core/creation.h>
#include <mica/ops/index/detail/scatter_combine.h>
#include <mica/ops/scan/detail/scan_rows_cuda.cuh>
#include <mica/ops/sort/detail/sort_kernels.h>

namespace mica::kernels {

namespace {

template <class S>
struct InRun {
  std::int64_t row;
  S value;
  Combination combination;
};

// A scan of one row: see ops/scan/detail/scan_bodies.h.
template <class T>
struct Runs {
  using Item = InRun<Combined<T>>;
  using Carry = Item;
  Combination combination;
  const T* src;
  const std::int64_t* rows;
  const std::int64_t* order;
  std::int64_t n;
  T* y;
  std::int64_t count;

  __device__ static Item identity() { return {-1, {}, Combination::last}; }
  __device__ static Item join(const Item& a, const Item& b) {
    return a.row != b.row ? b : Item{b.row, combine(b.combination, a.value, b.value), b.combination};
  }
  __device__ static Item join_carry(const Item& a, const Item& b) { return join(a, b); }
  __device__ Item load(std::int64_t, std::int64_t j) const {
    const std::int64_t i = order[j];
    return {rows[i], static_cast<Combined<T>>(src[i]), combination};
  }
  __device__ void store(std::int64_t, std::int64_t j, const Item& item) const {
    const bool ends = j + 1 == n || rows[order[j + 1]] != item.row;
    if (ends && item.row >= 0 && item.row < count) {
      y[item.row] = static_cast<T>(combine(combination, static_cast<Combined<T>>(y[item.row]), item.value));
    }
  }
};

}  // namespace

void scatter(Cuda on, const Scatter& args) {
  const std::int64_t n = args.rows.numel();
  if (n == 0) {
    return;
  }
  const Tensor one_row = as_strided(args.rows, {1, n}, {n, 1}, args.rows.handle()->offset);
  const Tensor order = empty({1, n}, int64, args.rows.device());
  argsort(on, Argsort{.x = one_row, .indices = order, .descending = false});
  on_dtype(AllTypes{}, args.y.dtype(), "scatter", [&]<class T>() {
    scan_rows(on,
              Runs<T>{.combination = args.combination,
                      .src = args.src.data<T>(),
                      .rows = args.rows.data<std::int64_t>(),
                      .order = order.data<std::int64_t>(),
                      .n = n,
                      .y = args.y.data<T>(),
                      .count = args.y.numel()},
              order);
  });
}

}  // namespace mica::kernels
