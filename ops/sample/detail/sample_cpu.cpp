#include <algorithm>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/images/detail/image_loop_cpu.h>
#include <mica/ops/sample/detail/sample_bodies.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kPlaneGrain = 65'536;  // the least work of a thread, in elements

// Interpolates a row-major plane: for each row of the result, the weighted sum of x's rows, then that along the row.
template <class T, class S = Accumulate<T>>
void resample_plane(const images::Grid& x_grid, const images::Grid& y_grid, const sample_bodies::Terms<S> (&terms)[3],
                    const T* x, T* y) {
  const int width = x_grid.sizes[2];
  std::vector<S> line(width);
  for (int row = 0; row < y_grid.sizes[0] * y_grid.sizes[1]; ++row) {
    std::fill(line.begin(), line.end(), S(0));
    terms[0].for_row(row / y_grid.sizes[1], [&](int a, S weight_a) {
      terms[1].for_row(row % y_grid.sizes[1], [&](int b, S weight_b) {
        const S weight = weight_a * weight_b;
        const T* const from = x + x_grid.flat(a, b, 0);
        S* const to = line.data();
        MICA_INDEPENDENT
        for (int c = 0; c < width; ++c) {
          to[c] += weight * static_cast<S>(from[c]);
        }
      });
    });
    for (int c = 0; c < y_grid.sizes[2]; ++c) {
      S sum = 0;
      terms[2].for_row(c, [&](int at, S weight) { sum += weight * line[at]; });
      *y++ = static_cast<T>(sum);
    }
  }
}

// Calls use(position of output 0 in the plane, row, outputs that are inside of the image) for the rows of outputs of
// one tap of the windows of a plane.
template <class F>
void for_rows_of_tap(const PoolWindows& w, const images::Grid& image, int tap, const F& use) {
  const int rest = tap / w.axes[2].size;
  const int k[3] = {rest / w.axes[1].size, rest % w.axes[1].size, tap % w.axes[2].size};
  const std::pair<int, int> outputs = w.axes[2].outputs_with_tap(k[2]);
  for (int row = 0; row < w.axes[0].out * w.axes[1].out; ++row) {
    const int a = w.axes[0].first(row / w.axes[1].out) + k[0] * w.axes[0].dilation;
    const int b = w.axes[1].first(row % w.axes[1].out) + k[1] * w.axes[1].dilation;
    const bool inside = a >= 0 && a < w.axes[0].in && b >= 0 && b < w.axes[1].in;
    const std::int64_t first = image.flat(a, b, 0) + k[2] * w.axes[2].dilation - w.axes[2].padding;
    use(first, row, inside ? outputs : std::pair<int, int>{0, 0});
  }
}

}  // namespace

static bool by_rows(Cpu, const Resample& a) {
  if (a.channels_last) {
    return false;
  }
  const images::Grid x = images::grid_of(a.x, false, "interpolate"), y = images::grid_of(a.y, false, "interpolate");
  on_dtype(FloatTypes{}, a.x.dtype(), "interpolate", [&]<class T>() {
    using S = Accumulate<T>;
    sample_bodies::Terms<S> terms[3];
    for (int axis = 0; axis < 3; ++axis) {
      const Tensor& positions = a.positions[axis];
      terms[axis] = {positions.data_or_null<std::int32_t>(), a.weights[axis].data_or_null<S>(),
                     positions.defined() ? static_cast<int>(positions.size(1)) : 1};
    }
    const std::int64_t work = x.plane() + 4 * y.plane();
    parallel_for(x.outer, std::max<std::int64_t>(kPlaneGrain / work, 1), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) {
        resample_plane<T>(x, y, terms, a.x.data<T>() + p * x.plane(), a.y.data<T>() + p * y.plane());
      }
    });
  });
  return true;
}

static bool by_rows(Cpu, const Columns& a, bool transposed = false) {
  const PoolWindows& w = a.windows;
  const images::Grid image = sample_bodies::grids_of(a).first, columns = sample_bodies::grids_of(a).second;
  const int n = w.axes[2].out;
  const int stride = w.axes[2].stride;
  const std::int64_t grain = std::max<std::int64_t>(kPlaneGrain / (columns.plane() * w.taps()), 1);
  on_dtype(FloatTypes{}, a.images.dtype(), "unfold", [&]<class T>() {
    using S = Accumulate<T>;
    parallel_for(image.outer, grain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<S> sums(transposed ? image.plane() : 0);
      for (std::int64_t p = begin; p < end; ++p) {
        T* const x = a.images.data<T>() + p * image.plane();
        std::fill(sums.begin(), sums.end(), S(0));
        for (int tap = 0; tap < w.taps(); ++tap) {
          T* const y = a.columns.data<T>() + (p * w.taps() + tap) * columns.plane();
          for_rows_of_tap(w, image, tap, [&](std::int64_t first, int row, std::pair<int, int> outputs) {
            T* const to = y + std::int64_t{row} * n;
            if (transposed) {
              for (int j = outputs.first; j < outputs.second; ++j) {
                sums[first + std::int64_t{j} * stride] += static_cast<S>(to[j]);
              }
              return;
            }
            std::fill(to, to + outputs.first, T(0.0f));
            for (int j = outputs.first; j < outputs.second; ++j) {
              to[j] = x[first + std::int64_t{j} * stride];
            }
            std::fill(to + outputs.second, to + n, T(0.0f));
          });
        }
        if (transposed) {
          for (std::int64_t i = 0; i < image.plane(); ++i) {
            x[i] = static_cast<T>(sums[i]);
          }
        }
      }
    });
  });
  return true;
}

MICA_INSTANTIATE_SAMPLE(Cpu)

}  // namespace mica::kernels
