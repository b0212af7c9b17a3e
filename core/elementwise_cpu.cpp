#include <algorithm>
#include <functional>

#include <mica/core/elementwise_cpu.h>

namespace mica::detail {

// Elements per thread, at least: below, another thread costs more than it saves.
inline constexpr std::int64_t kElementwiseGrain = 16384;

template <int N>
void for_each_run(const StridedLoop<N>& loop, void (*run)(const void*, std::int64_t, const std::int64_t*),
                  const void* closure) {
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    // The position of element `begin` along each axis, and its offset in each tensor.
    std::array<std::int64_t, kMaxRank> index{};
    std::array<std::int64_t, N> at{};
    std::int64_t rest = begin;
    for (int axis = loop.rank - 1; axis >= 0 && rest > 0; --axis) {
      index[axis] = rest % loop.sizes[axis];
      rest /= loop.sizes[axis];
      for (int t = 0; t < N; ++t) {
        at[t] += index[axis] * loop.strides[t][axis];
      }
    }
    const int last = loop.rank - 1;
    while (begin < end) {
      const std::int64_t count = std::min(end - begin, loop.inner_size() - index[last]);
      run(closure, count, at.data());
      begin += count;
      // On to the start of the next run.
      for (int t = 0; t < N; ++t) {
        at[t] -= index[last] * loop.strides[t][last];
      }
      index[last] = 0;
      for (int axis = last - 1; axis >= 0; --axis) {
        const bool wraps = ++index[axis] == loop.sizes[axis];
        for (int t = 0; t < N; ++t) {
          at[t] += loop.strides[t][axis] * (wraps ? 1 - loop.sizes[axis] : 1);
        }
        if (!wraps) {
          break;
        }
        index[axis] = 0;
      }
    }
  };
  if (loop.numel <= kElementwiseGrain) {
    body(0, loop.numel);
  } else {
    parallel_for(loop.numel, kElementwiseGrain, std::ref(body));
  }
}

template void for_each_run(const StridedLoop<1>&, void (*)(const void*, std::int64_t, const std::int64_t*),
                           const void*);
template void for_each_run(const StridedLoop<2>&, void (*)(const void*, std::int64_t, const std::int64_t*),
                           const void*);
template void for_each_run(const StridedLoop<3>&, void (*)(const void*, std::int64_t, const std::int64_t*),
                           const void*);
template void for_each_run(const StridedLoop<4>&, void (*)(const void*, std::int64_t, const std::int64_t*),
                           const void*);
template void for_each_run(const StridedLoop<5>&, void (*)(const void*, std::int64_t, const std::int64_t*),
                           const void*);

}  // namespace mica::detail
