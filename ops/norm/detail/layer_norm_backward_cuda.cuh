#pragma once

// What the CUDA kernels of layer_norm's backward share. T is the type of x, dy and dx, W that of the parameters, S that
// of sums: float, or double for double.

#include <cstdint>

#include <mica/core/tensor.h>
#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/norm/detail/layer_norm_kernels.h>

namespace mica::kernels::layer_norm_cuda {

/// What forward has found out about a row.
template <class T>
struct Statistics {
  using S = Accumulate<T>;
  S mean;
  S rstd;
  S mean_rest;

  __device__ S x_hat(S x) const {
    if constexpr (has_mean_rest(sizeof(T))) {
      return fma(x - mean, rstd, mean_rest);
    } else {
      return (x - mean) * rstd;
    }
  }
};

template <class T, class W>
struct Backward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* dy;
  const T* x;
  const W* weight;
  const S* mean;
  const S* mean_rest;  // only where x has more than 16 bits
  const S* rstd;
  T* dx;                  // null, as what follows may be: not wanted
  W* dweight;             // (N)
  W* dbias;               // (N)
  T* dx_sum = nullptr;    // (N), the sum of dx's rows as add_layer_norm has it
  S* dweights = nullptr;  // (G, N), partial sums
  S* dbiases = nullptr;   // (G, N)
  S* dx_sums = nullptr;   // (G, N)

  /// Zeros for a row that is not `present`.
  __device__ Statistics<T> statistics(std::int64_t row, bool present = true) const {
    Statistics<T> result{};
    if (present) {
      result.mean = mean[row];
      result.rstd = rstd[row];
      if constexpr (has_mean_rest(sizeof(T))) {
        result.mean_rest = mean_rest[row];
      }
    }
    return result;
  }
};

/// Those of a group's rows, which a warp fetches 32 at a time: loads in each row would wait behind its copies.
template <class T, class W>
class RowStatistics {
 public:
  __device__ RowStatistics(const Backward<T, W>& a, std::int64_t first, std::int64_t step)
      : a_(a), step_(step), ahead_(first + threadIdx.x % rows::kWarp * step) {
    fetch();
  }

  /// Those of the next row.
  __device__ Statistics<T> take() {
    const int i = taken_++ % rows::kWarp;
    if (i == 0) {
      current_ = next_;
      fetch();
    }
    Statistics<T> result{.mean = __shfl_sync(rows::kAllLanes, current_.mean, i),
                         .rstd = __shfl_sync(rows::kAllLanes, current_.rstd, i),
                         .mean_rest = 0};
    if constexpr (has_mean_rest(sizeof(T))) {
      result.mean_rest = __shfl_sync(rows::kAllLanes, current_.mean_rest, i);
    }
    return result;
  }

 private:
  __device__ void fetch() {
    if (ahead_ < a_.rows) {
      next_ = a_.statistics(ahead_);
    }
    ahead_ += rows::kWarp * step_;
  }

  const Backward<T, W>& a_;
  std::int64_t step_;
  std::int64_t ahead_;  // the lane's next row
  unsigned taken_ = 0;
  Statistics<T> current_{};
  Statistics<T> next_{};
};

/// Memory for G rows of those partials that are wanted; a has the pointers. Undefined: none are.
template <class T, class W>
Tensor allocate_partials(Backward<T, W>& a, std::int64_t partial_rows, Device device) {
  using S = Accumulate<T>;
  const std::int64_t one = partial_rows * a.columns;
  const int wanted = (a.dweight != nullptr) + (a.dbias != nullptr) + (a.dx_sum != nullptr);
  if (wanted == 0) {
    return {};
  }
  Tensor partials = empty({wanted * one}, dtype_of<S>, device);
  S* next = partials.template data<S>();
  const auto take = [&](bool is_wanted) {
    S* const taken = is_wanted ? next : nullptr;
    next += is_wanted ? one : 0;
    return taken;
  };
  a.dweights = take(a.dweight != nullptr);
  a.dbiases = take(a.dbias != nullptr);
  a.dx_sums = take(a.dx_sum != nullptr);
  return partials;
}

/// Stage 2: dweight, dbias and dx_sum, those that are wanted, from G rows of partials.
template <class T, class W>
void add_partials(const Backward<T, W>& a, std::int64_t partial_rows);

/// dweight and dbias, those that are wanted, without dx.
template <class T, class W>
void backward_parameters(Backward<T, W> a, Device device);

/// Stage 1 with rows that stream through shared memory: how many rows of partials it writes, G. 0: it is not for rows
/// of this length or alignment, or not for this chip.
template <class T, class W>
std::int64_t stream_partial_rows(const Backward<T, W>& a);

template <class T, class W>
void backward_stream(const Backward<T, W>& a);

}  // namespace mica::kernels::layer_norm_cuda
