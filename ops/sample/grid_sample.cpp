#include <cstdint>
#include <utility>
#include <vector>

#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/images/detail/image_grid.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/sample/sample.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// One of the elements along an axis that a sample is computed from: positions and weights, one for each sample.
struct Neighbor {
  Tensor position;  // whole numbers
  Tensor weight;    // undefined: 1
};

Tensor remainder(const Tensor& a, double b) { return a - floor(a / b).detach() * b; }

// Positions, mirrored at `low` and `high` until they are between them.
Tensor mirrored(const Tensor& at, double low, double high) {
  const double span = high - low;
  if (span == 0) {
    return at * 0.0;
  }
  const Tensor distance = remainder(abs(at - low), 2 * span);
  return minimum(distance, 2 * span - distance) + low;
}

Tensor padded(const Tensor& at, double size, const GridSampleOptions& options) {
  if (options.padding == SamplePadding::zeros) {
    return at;
  }
  Tensor inside = at;
  if (options.padding == SamplePadding::reflection) {
    inside = options.align_corners ? mirrored(at, 0, size - 1) : mirrored(at, -0.5, size - 0.5);
  }
  return clamp(inside, 0, size - 1);
}

std::vector<Neighbor> cubic_neighbors(const Tensor& at, double size, const GridSampleOptions& options) {
  const Tensor left = floor(at).detach();
  const Tensor t = at - left;
  constexpr double a = -0.75;
  const auto near = [](const Tensor& d) { return ((d * (a + 2) - (a + 3)) * d) * d + 1; };
  const auto far = [](const Tensor& d) { return ((d * a - 5 * a) * d + 8 * a) * d - 4 * a; };
  const std::vector<Tensor> weights{far(t + 1), near(t), near(1 - t), far(2 - t)};
  std::vector<Neighbor> result;
  result.reserve(weights.size());
  for (int k = 0; k < 4; ++k) {
    result.push_back({padded(left + (k - 1.0), size, options), weights[k]});
  }
  return result;
}

// The neighbors along an axis of `size` elements of samples at `at`, in [−1, 1].
std::vector<Neighbor> neighbors(const Tensor& at, double size, const GridSampleOptions& options) {
  const Tensor place = options.align_corners ? (at + 1) * ((size - 1) / 2) : ((at + 1) * size - 1) * 0.5;
  if (options.mode == Interpolation::cubic) {
    return cubic_neighbors(place, size, options);
  }
  const Tensor inside = padded(place, size, options);
  if (options.mode == Interpolation::nearest) {
    return {{round(inside).detach(), {}}};
  }
  const Tensor left = floor(inside).detach();
  const Tensor right_weight = inside - left;
  return {{left, 1 - right_weight}, {left + 1, right_weight}};
}

Tensor product(const Tensor& a, const Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a * b; }

// The weighted sum of rows of `table` over all combinations of neighbors along the axes from `axis` on. `row` is the
// number of the row as far as the axes before it determine it, `inside` whether they are inside of the image.
void add_samples(Tensor& sum, const Tensor& table, const std::vector<std::vector<Neighbor>>& axes,
                 const std::vector<std::int64_t>& sizes, std::size_t axis, const Tensor& row, const Tensor& inside,
                 const Tensor& weight) {
  if (axis == axes.size()) {
    const Tensor factor = product(inside, weight);
    const Tensor taken = index_select(table, 0, reshape(row, {-1}));
    const Tensor term = taken * reshape(factor, {-1, 1});
    sum = sum.defined() ? sum + term : term;
    return;
  }
  for (const Neighbor& neighbor : axes[axis]) {
    const auto last = static_cast<double>(sizes[axis] - 1);
    const Tensor position = neighbor.position.detach();
    const Tensor is_inside = logical_and(ge(position, 0), le(position, last));
    const Tensor index = masked_fill(position, logical_not(is_inside), 0).to(int64);
    add_samples(sum, table, axes, sizes, axis + 1, row * static_cast<double>(sizes[axis]) + index,
                product(inside, is_inside.to(table.dtype())), product(weight, neighbor.weight));
  }
}

void check_grid(const Tensor& x, const Tensor& grid, const GridSampleOptions& options) {
  constexpr const char* kOp = "grid_sample";
  const int axes = x.dim() - 2;
  check(axes == 2 || axes == 3, "{}: expected x of shape (N, C, 2 or 3 spatial axes), got {}", kOp, x.shape());
  images::check_images(kOp, x, axes);
  check(grid.dim() == axes + 2 && grid.size(0) == x.size(0) && grid.size(-1) == axes,
        "{}: expected a grid of shape ({}, {} spatial axes, {}), got {}", kOp, x.size(0), axes, axes, grid.shape());
  check(grid.dtype() == x.dtype() && grid.device() == x.device(), "{}: expected a grid of {} on {}, got {} on {}", kOp,
        x.dtype(), x.device(), grid.dtype(), grid.device());
  check(options.mode == Interpolation::nearest || options.mode == Interpolation::linear ||
            (options.mode == Interpolation::cubic && axes == 2),
        "{}: expected the mode nearest, linear or, for two spatial axes, cubic", kOp);
}

}  // namespace

Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options) {
  check_grid(x, grid, options);
  const int axes = x.dim() - 2;
  const std::int64_t channels = x.size(1);
  Dims channels_last_order{0};
  for (int i = 0; i < axes; ++i) {
    channels_last_order.push_back(2 + i);
  }
  channels_last_order.push_back(1);
  Shape shape = grid.shape();
  shape.back() = channels;
  Dims back{0, axes + 1};
  for (int i = 0; i < axes; ++i) {
    back.push_back(1 + i);
  }
  if (grid.numel() == 0) {
    return contiguous(permute(expand(sum(grid, {-1}, true) + sum(x), shape), back));
  }
  // 16-bit floats cannot count pixels.
  const DType sums = accumulate_dtype(x.dtype());
  const Tensor table = reshape(permute(x, channels_last_order).to(sums), {-1, channels});
  const Tensor places = grid.to(sums);
  std::vector<std::vector<Neighbor>> of_axes;
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < axes; ++i) {
    sizes.push_back(x.size(2 + i));
    of_axes.push_back(neighbors(select(places, -1, axes - 1 - i), static_cast<double>(sizes.back()), options));
  }
  Shape images = Shape::filled(axes + 1, 1);
  images[0] = x.size(0);
  Shape samples = grid.shape();
  samples.pop_back();
  const Tensor image = expand(reshape(arange(static_cast<double>(x.size(0)), int64, x.device()), images), samples);
  Tensor y;
  add_samples(y, table, of_axes, sizes, 0, image, Tensor{}, Tensor{});
  return contiguous(permute(reshape(y, shape), back)).to(x.dtype());
}

Tensor affine_grid(const Tensor& theta, const Shape& size, bool align_corners) {
  const int axes = size.size() - 2;
  check(axes == 2 || axes == 3, "affine_grid: expected a size (N, C, 2 or 3 spatial axes), got {}", size);
  check(is_floating(theta.dtype()) && theta.shape() == Shape{size[0], axes, axes + 1},
        "affine_grid: expected floating theta of shape [{}, {}, {}], got {} {}", size[0], axes, axes + 1, theta.dtype(),
        theta.shape());
  Shape spatial = size.slice(2);
  Tensors parts;
  for (int i = axes - 1; i >= 0; --i) {
    const std::int64_t length = spatial[i];
    check(length > 0, "affine_grid: expected spatial sizes of at least 1, got {}", size);
    const auto count = static_cast<double>(length);
    const Tensor index = arange(count, accumulate_dtype(theta.dtype()), theta.device());
    Shape along = Shape::filled(axes, 1);
    along[i] = length;
    const Tensor at = !align_corners ? (index * 2.0 + 1.0) / count - 1.0
                      : length > 1   ? index * (2 / (count - 1)) - 1.0
                                     : index;
    parts.push_back(expand(reshape(at.to(theta.dtype()), along), spatial));
  }
  parts.push_back(ones(spatial, theta.dtype(), theta.device()));
  const Tensor base = reshape(stack(parts, -1), {-1, axes + 1});
  Shape result = spatial;
  result.insert(0, size[0]);
  result.push_back(axes);
  return reshape(matmul(base, transpose(theta, 1, 2)), result);
}

}  // namespace mica
