// Convolutions on the CPU, as products of matrices whose columns are gathered from the input, a block at a time:
//
//     source images ──> columns: a row for each channel and tap,  ──> filters · columns ──> result, plus bias
//                       a column for each place of the result         (ops/gemm)
//
// A product is divided into grids of places that see the same taps. The convolution itself is one grid. Of its input
// gradient, places whose positions have the same remainder by the stride are a grid: elements o of y that are combined
// with tap r at such a place are consecutive, and other taps belong to other grids. So nothing is multiplied by zeros.

// GCC 12 warns about uninitialized variables in its own AVX-512 intrinsics, and about packets as template
// arguments.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/detail/ceil_div.h>
#include <mica/core/parallel.h>
#include <mica/ops/conv/detail/conv_kernels.h>
#include <mica/ops/gemm/detail/gemm_cpu.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::kernels {

namespace {

using Lengths = std::array<std::int64_t, 3>;

constexpr std::int64_t kBlockElements = std::int64_t{1} << 17;  // of gathered columns, for the L2 cache
constexpr std::int64_t kMostPlaces = 512;                       // of a block
constexpr std::int64_t kFewWeights = std::int64_t{1} << 16;     // up to which their gradient is summed in parts
constexpr std::int64_t kParts = 16;

// Spatial lengths as three axes, the first ones of length 1.
Lengths three(const Dims& dims, int from, std::int64_t fill) {
  Lengths result{fill, fill, fill};
  for (int axis = from; axis < dims.size(); ++axis) {
    result[3 - dims.size() + axis] = dims[axis];
  }
  return result;
}

// A tap of a filter, and the element of the source that it meets at place 0.
struct Tap {
  std::int64_t tap, start;
};

// Places of the result along one axis: first, first + step, …
struct Axis {
  std::int64_t count, first, step;
  std::int64_t stride;  // in the source, from one place to the next
  std::vector<Tap> taps;
};

// A combination of taps of the three axes: their number in the filter, and where they start.
struct TapOfGrid {
  std::int64_t tap, z, y, x;
};

struct Grid {
  std::array<Axis, 3> axes;
  std::int64_t places() const { return axes[0].count * axes[1].count * axes[2].count; }
  std::int64_t taps() const {
    return static_cast<std::int64_t>(axes[0].taps.size() * axes[1].taps.size() * axes[2].taps.size());
  }
  std::vector<TapOfGrid> all_taps(const Lengths& filter) const {
    std::vector<TapOfGrid> all;
    for (const Tap& z : axes[0].taps) {
      for (const Tap& y : axes[1].taps) {
        for (const Tap& x : axes[2].taps) {
          all.push_back({(z.tap * filter[1] + y.tap) * filter[2] + x.tap, z.start, y.start, x.start});
        }
      }
    }
    return all;
  }
};

// A Convolution with three spatial axes. `source` is what is gathered: x, or y for the result x.
struct Sizes {
  Lengths x, filter, y, stride, dilation, padding;
  std::int64_t images, groups, x_channels, y_channels;  // channels of a group

  explicit Sizes(const ConvGeometry& g)
      : x(three(g.x, 2, 1)),
        filter(three(g.weight, 2, 1)),
        y(three(g.y, 2, 1)),
        stride(three(g.stride, 0, 1)),
        dilation(three(g.dilation, 0, 1)),
        padding(three(g.padding, 0, 0)),
        images(g.x[0]),
        groups(g.groups),
        x_channels(g.weight[1]),
        y_channels(g.weight[0] / g.groups) {}

  std::int64_t taps() const { return filter[0] * filter[1] * filter[2]; }

  Grid forward_grid() const {
    Grid grid;
    for (int a = 0; a < 3; ++a) {
      grid.axes[a] = {.count = y[a], .first = 0, .step = 1, .stride = stride[a], .taps = {}};
      for (std::int64_t r = 0; r < filter[a]; ++r) {
        grid.axes[a].taps.push_back({r, r * dilation[a] - padding[a]});
      }
    }
    return grid;
  }

  // The grids of the input gradient. Place i of x meets tap r at y's element (i + padding − r · dilation) / stride.
  std::vector<Grid> backward_grids() const {
    std::array<std::vector<Axis>, 3> axes;
    for (int a = 0; a < 3; ++a) {
      for (std::int64_t first = 0; first < std::min(stride[a], x[a]); ++first) {
        Axis axis{
            .count = (x[a] - first - 1) / stride[a] + 1, .first = first, .step = stride[a], .stride = 1, .taps = {}};
        for (std::int64_t r = 0; r < filter[a]; ++r) {
          const std::int64_t at = first + padding[a] - r * dilation[a];
          if (at % stride[a] == 0) {
            axis.taps.push_back({r, at / stride[a]});
          }
        }
        axes[a].push_back(axis);
      }
    }
    std::vector<Grid> grids;
    for (const Axis& z : axes[0]) {
      for (const Axis& y_axis : axes[1]) {
        for (const Axis& x_axis : axes[2]) {
          grids.push_back({{z, y_axis, x_axis}});
        }
      }
    }
    return grids;
  }
};

// Whether places that follow each other in the images of a grid meet source elements that do, at any tap, except at the
// ends of rows: rows are as long as the source's, and not strided.
bool is_flat(const Grid& grid, const Lengths& source) {
  return grid.axes[2].count == source[2] && grid.axes[2].stride == 1 && grid.axes[1].stride == 1;
}

// Consecutive places and the columns of a block that they are. They are in one row or, in a flat run, in a plane of
// rows; x then counts from the plane's first place.
struct Run {
  std::int64_t image, z, y, x, length, column;
  std::int64_t in_row;  // x as a place of a row
};

// The runs of columns [begin, end), where places of all images are numbered one after the other. No run crosses a
// multiple of `tile`.
void find_runs(const Grid& grid, bool flat, std::int64_t begin, std::int64_t end, std::int64_t tile,
               std::vector<Run>& runs) {
  runs.clear();
  const std::int64_t rows = flat ? 1 : grid.axes[1].count, planes = grid.axes[0].count;
  const std::int64_t width = grid.axes[2].count * (flat ? grid.axes[1].count : 1);
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t row = at / width, x = at % width, column = at - begin;
    const std::int64_t length = std::min({width - x, end - at, tile - column % tile});
    runs.push_back({row / rows / planes, row / rows % planes, row % rows, x, length, column, x % grid.axes[2].count});
    at += length;
  }
}

// Places [begin, end) of a row whose source elements start + stride · place are inside of [0, size).
struct Inside {
  std::int64_t begin, end;

  Inside(std::int64_t start, std::int64_t stride, std::int64_t size, std::int64_t count) {
    begin = std::clamp<std::int64_t>(start < 0 ? ceil_div(-start, stride) : 0, 0, count);
    end = std::clamp<std::int64_t>(start < size ? (size - 1 - start) / stride + 1 : 0, begin, count);
  }
};

// Copies `length` elements in as few moves as possible: runs are often as short as a row of an image.
template <class T, class P>
[[gnu::always_inline]] inline void copy_run(const T* from, std::int64_t length, P* to) {
  if constexpr (std::is_same_v<T, P>) {
    const auto move = [&]<std::size_t kCount>(std::integral_constant<std::size_t, kCount>) {
      constexpr auto kStep = static_cast<std::int64_t>(kCount);
      for (std::int64_t i = 0; i + kStep < length; i += kStep) {
        std::memcpy(to + i, from + i, kCount * sizeof(T));
      }
      std::memcpy(to + length - kStep, from + length - kStep, kCount * sizeof(T));  // overlaps
    };
    if (length >= 16) {
      move(std::integral_constant<std::size_t, 16>());
    } else if (length >= 4) {
      move(std::integral_constant<std::size_t, 4>());
    } else {
      move(std::integral_constant<std::size_t, 1>());
    }
  } else {
    std::transform(from, from + length, to, [](T value) { return static_cast<P>(value); });
  }
}

// to = from + start, in as few moves as possible, as above.
template <class S, class T>
void write_run(const S* from, S start, std::int64_t length, T* to) {
  constexpr std::int64_t kStep = 16;
  if (length < kStep) {
    std::transform(from, from + length, to, [start](S sum) { return static_cast<T>(sum + start); });
    return;
  }
  for (std::int64_t i = 0; i < length; i += kStep) {
    const std::int64_t at = std::min(i, length - kStep);
    for (std::int64_t lane = 0; lane < kStep; ++lane) {
      to[at + lane] = static_cast<T>(from[at + lane] + start);
    }
  }
}

// A tensor (N, groups · channels, three spatial axes), contiguous.
template <class T>
struct Images {
  T* data;
  std::int64_t channels;  // of all groups
  Lengths size;

  std::int64_t plane() const { return size[0] * size[1] * size[2]; }
  T* at(std::int64_t image, std::int64_t channel) const { return data + (image * channels + channel) * plane(); }
};

// What one tap of a filter finds in a channel's source at the places of a run.
struct Piece {
  std::int64_t begin = 0, end = 0;  // places with an element; those before and after are 0
  std::int64_t offset = 0;          // of place 0's element from the channel's first
};

// Also sets `zeros` to the places in a flat run that are 0 since the element is in another row.
Piece piece_of(const Run& run, const TapOfGrid& tap, const Grid& grid, const Lengths& source, bool flat,
               std::vector<std::int32_t>& zeros) {
  zeros.clear();
  const auto [depth, height, width] = source;
  const std::int64_t z = run.z * grid.axes[0].stride + tap.z, y = run.y * grid.axes[1].stride + tap.y;
  if (z < 0 || z >= depth || (!flat && (y < 0 || y >= height))) {
    return {};
  }
  if (!flat) {
    const std::int64_t stride = grid.axes[2].stride, start = run.x * stride + tap.x;
    const Inside inside(start, stride, width, run.length);
    return {.begin = inside.begin, .end = inside.end, .offset = (z * height + y) * width + start};
  }
  const std::int64_t shift = tap.y * width + tap.x;
  const std::int64_t first = std::max(std::max<std::int64_t>(-tap.y, 0) * width, -shift);
  const std::int64_t last = std::min(std::min(grid.axes[1].count, height - tap.y) * width, height * width - shift);
  const std::int64_t from = tap.x > 0 ? std::max<std::int64_t>(width - tap.x, 0) : 0;
  const std::int64_t to = tap.x > 0 ? width : std::min(-tap.x, width);
  for (std::int64_t row = -run.in_row; row < run.length && from < to; row += width) {
    for (std::int64_t i = std::max<std::int64_t>(row + from, 0); i < std::min(row + to, run.length); ++i) {
      zeros.push_back(static_cast<std::int32_t>(i));
    }
  }
  const std::int64_t begin = std::clamp<std::int64_t>(first - run.x, 0, run.length);
  return {.begin = begin,
          .end = std::clamp<std::int64_t>(last - run.x, begin, run.length),
          .offset = z * height * width + run.x + shift};
}

// Copies `length` elements, `step` apart.
template <class T, class P>
void copy_strided(const T* from, std::int64_t step, std::int64_t length, P* to) {
  if (step == 1) {
    copy_run(from, length, to);
  } else if (step == 2) {  // a constant, for which the compiler vectorizes
    for (std::int64_t i = 0; i < length; ++i) {
      to[i] = static_cast<P>(from[2 * i]);
    }
  } else {
    for (std::int64_t i = 0; i < length; ++i) {
      to[i] = static_cast<P>(from[i * step]);
    }
  }
}

// Gathers rows [first, last), row = channel · taps + tap, of the block with these runs. A tile of `tile` columns is
// row-major, and tiles follow each other.
template <class T, class P>
void gather(const Grid& grid, const std::vector<TapOfGrid>& taps, const Images<const T>& source, std::int64_t channel,
            std::int64_t first, std::int64_t last, bool flat, const std::vector<Run>& runs, std::int64_t tile, P* out) {
  static thread_local std::vector<std::int32_t> zeros;
  const auto count = static_cast<std::int64_t>(taps.size());
  const std::int64_t stride = grid.axes[2].stride;
  for (const Run& run : runs) {
    const std::int64_t begin = run.column / tile * tile;
    P* const to = out + begin * (last - first) + run.column - begin;
    for (std::int64_t tap = 0; tap < count; ++tap) {
      const Piece piece = piece_of(run, taps[tap], grid, source.size, flat, zeros);
      for (std::int64_t c = first > tap ? ceil_div(first - tap, count) : 0; c * count + tap < last; ++c) {
        P* const at = to + (c * count + tap - first) * tile;
        std::fill(at, at + piece.begin, P{});
        std::fill(at + piece.end, at + run.length, P{});
        if (piece.begin < piece.end) {
          const T* const from = source.at(run.image, channel + c) + piece.offset;
          copy_strided(from + piece.begin * stride, stride, piece.end - piece.begin, at + piece.begin);
        }
        for (const std::int32_t zero : zeros) {
          at[zero] = P{};
        }
      }
    }
  }
}

// The rows of a product's left matrix: one for each channel of the result, in a form that gemm reads in place.
template <class P>
struct Filters {
  gemm::Matrix<P> matrix;
  std::vector<P> copy;
};

template <class P>
constexpr bool kOnTiles = !std::is_same_v<P, BFloat16>;  // gemm_cpu.h's loops; else those of bfloat16_gemm.h

// Elements from a row to the next that do not map rows to the same cache sets.
template <class P>
std::int64_t padded_row(std::int64_t depth) {
  return kOnTiles<P> ? depth + gemm::Tile<P>::kWidth : depth;
}

// For the convolution: a group's rows of the weight (K, C · taps).
template <class P, class T>
Filters<P> forward_filters(const Sizes& s, const T* weight) {
  const std::int64_t depth = s.x_channels * s.taps();
  Filters<P> filters;
  if constexpr (std::is_same_v<P, T>) {
    filters.matrix = {weight, depth, 1};
    if (!kOnTiles<P> || gemm::a_is_direct<P>(filters.matrix)) {
      return filters;
    }
  }
  const std::int64_t row = padded_row<P>(depth);
  filters.copy.resize(s.y_channels * row);
  for (std::int64_t k = 0; k < s.y_channels; ++k) {
    std::transform(weight + k * depth, weight + (k + 1) * depth, filters.copy.data() + k * row,
                   [](T value) { return static_cast<P>(value); });
  }
  filters.matrix = {filters.copy.data(), row, 1};
  return filters;
}

// For the input gradient: (C, K · taps of the grid).
template <class P, class T>
Filters<P> backward_filters(const Sizes& s, const Grid& grid, const T* weight) {
  const std::int64_t taps = grid.taps(), row = padded_row<P>(s.y_channels * taps);
  Filters<P> filters;
  filters.copy.resize(s.x_channels * row);
  const std::vector<TapOfGrid> all = grid.all_taps(s.filter);
  const auto copy_filter = [&](std::int64_t c, std::int64_t k) {
    const T* const from = weight + (k * s.x_channels + c) * s.taps();
    P* const to = filters.copy.data() + c * row + k * taps;
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      to[tap] = static_cast<P>(from[all[tap].tap]);
    }
  };
  // In squares of channels, so that both sides are read and written in whole cache lines.
  constexpr std::int64_t kSide = 16;
  const std::int64_t across = ceil_div(s.y_channels, kSide), squares = ceil_div(s.x_channels, kSide) * across;
  parallel_for(squares, gemm::kPackGrain / (kSide * kSide * taps + 1) + 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t square = begin; square < end; ++square) {
      const std::int64_t c0 = square / across * kSide, k0 = square % across * kSide;
      for (std::int64_t c = c0; c < std::min(c0 + kSide, s.x_channels); ++c) {
        for (std::int64_t k = k0; k < std::min(k0 + kSide, s.y_channels); ++k) {
          copy_filter(c, k);
        }
      }
    }
  });
  filters.matrix = {filters.copy.data(), row, 1};
  return filters;
}

// A grid of images needs no columns if rows of the source are copied with zeros between them: what a tap meets at
// consecutive places, and between the rows, is then consecutive in memory, at a distance that depends on the tap. With
// a stride, elements whose positions have the same remainder, a phase, are copied together. Products are summed between
// the rows, too, but nothing is gathered for each tap. Worth it for few channels.
struct Band {
  std::int64_t rows = 0;                      // of places at a time; 0: not worth it
  std::int64_t pitch = 0;                     // from a row to the next
  std::int64_t reach = 0;                     // the elements of a row that taps meet
  std::int64_t before = 0;                    // zeros before the first row
  std::int64_t first_row = 0, more_rows = 0;  // of a phase, from a place's row; and beside as many rows as places
  std::vector<std::array<int, 2>> phases;     // the remainders along y and x
  std::vector<TapOfGrid> taps;                // the number of its phase, and where in the phase it starts

  std::int64_t columns(std::int64_t width, std::int64_t tile) const {
    return ceil_div((rows - 1) * pitch + width, tile) * tile;
  }
};

Band band_of(const Grid& grid, const std::vector<TapOfGrid>& taps, const Lengths& source, std::int64_t in_channels,
             std::int64_t out_channels, std::int64_t tile) {
  constexpr std::int64_t kGathering = 20;  // the cost of gathering a tile's row, in channels of the result
  if (taps.empty() || source[0] != 1 || grid.axes[0].count != 1 ||
      std::any_of(taps.begin(), taps.end(), [](const TapOfGrid& tap) { return tap.z != 0; })) {
    return {};
  }
  Band band;
  const std::int64_t all = grid.axes[1].count, width = grid.axes[2].count;
  const auto floor_div = [](std::int64_t a, std::int64_t b) { return a >= 0 ? a / b : -ceil_div(-a, b); };
  std::int64_t last_row = INT64_MIN, elements = 0;
  band.first_row = INT64_MAX;
  band.reach = width;
  for (const TapOfGrid& tap : taps) {
    const std::int64_t y_stride = grid.axes[1].stride, x_stride = grid.axes[2].stride;
    const std::int64_t y = floor_div(tap.y, y_stride), x = floor_div(tap.x, x_stride);
    const std::array<int, 2> phase{static_cast<int>(tap.y - y * y_stride), static_cast<int>(tap.x - x * x_stride)};
    const auto at = std::find(band.phases.begin(), band.phases.end(), phase);
    band.taps.push_back({at - band.phases.begin(), 0, y, x});
    if (at == band.phases.end()) {
      band.phases.push_back(phase);
    }
    band.first_row = std::min(band.first_row, y);
    last_row = std::max(last_row, y);
    band.before = std::max(band.before, -x);
    band.reach = std::max(band.reach, width + x);
    elements = std::max(elements, ceil_div(source[2] - phase[1], x_stride));
  }
  band.more_rows = last_row - band.first_row;
  band.pitch = std::max(band.reach, std::min(elements, band.reach) + band.before);
  const std::int64_t planes = in_channels * static_cast<std::int64_t>(band.phases.size());
  const std::int64_t fit =
      std::min(kBlockElements / (planes * band.pitch) - band.more_rows, kBlockElements / (out_channels * band.pitch));
  band.rows = ceil_div(all, ceil_div(all, std::clamp<std::int64_t>(fit, 1, all)));
  const bool worth = band.columns(width, tile) * out_channels <= band.rows * width * (out_channels + kGathering);
  return worth ? band : Band{};
}

// The elements of a band's copy of `channels` channels for `rows` rows of places, when columns [0, columns) are read.
std::int64_t band_size(const Band& band, std::int64_t channels, std::int64_t rows, std::int64_t columns) {
  const auto phases = static_cast<std::int64_t>(band.phases.size());
  return band.before + (channels * phases * (rows + band.more_rows) + 1) * band.pitch + columns;
}

// Makes the copy for the rows of places from `first` on. Sets `offsets` to where each row (channel, tap) starts in it.
template <class T, class P>
void copy_band(const Band& band, const Grid& grid, const Images<const T>& source, std::int64_t image,
               std::int64_t first_channel, std::int64_t channels, std::int64_t first, std::int64_t rows,
               std::int64_t columns, P* out, std::vector<std::int64_t>& offsets) {
  const std::int64_t height = source.size[1], width = source.size[2], stride = grid.axes[2].stride;
  const std::int64_t lines = rows + band.more_rows;
  const auto phases = static_cast<std::int64_t>(band.phases.size());
  std::fill_n(out, band.before, P{});
  P* to = out + band.before;
  for (std::int64_t c = 0; c < channels; ++c) {
    const T* const channel = source.at(image, first_channel + c);
    for (const auto& [y_phase, x_phase] : band.phases) {
      const std::int64_t count = std::clamp<std::int64_t>(ceil_div(width - x_phase, stride), 0, band.reach);
      for (std::int64_t line = 0; line < lines; ++line, to += band.pitch) {
        const std::int64_t y = (first + band.first_row + line) * grid.axes[1].stride + y_phase;
        const std::int64_t inside = y >= 0 && y < height ? count : 0;
        if (inside > 0) {
          copy_strided(channel + y * width + x_phase, stride, inside, to);
        }
        std::fill(to + inside, to + band.pitch, P{});
      }
    }
  }
  std::fill(to, out + band_size(band, channels, rows, columns), P{});
  offsets.clear();
  for (std::int64_t c = 0; c < channels; ++c) {
    for (const TapOfGrid& tap : band.taps) {
      const std::int64_t line = (c * phases + tap.tap) * lines + tap.y - band.first_row;
      offsets.push_back(band.before + line * band.pitch + tap.x);
    }
  }
}

// c = a · b or, with `add`, c += a · b, for a tile c of R rows and two packets; row k of b starts at b + offsets[k].
template <class S, int R>
EIGEN_DONT_INLINE void multiply_shifted(std::int64_t depth, const S* a, std::int64_t a_row, const std::int64_t* offsets,
                                        const S* b, bool add, S* c, std::int64_t leading) {
  using Packet = typename gemm::Tile<S>::Packet;
  constexpr int kWidth = gemm::Tile<S>::kWidth;
  Packet sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sums[r][0] = sums[r][1] = gemm::packets::pset1<Packet>(S{0});
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    const S* const from = b + offsets[k];
    const Packet line[2] = {gemm::packets::ploadu<Packet>(from), gemm::packets::ploadu<Packet>(from + kWidth)};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Packet x = gemm::packets::pset1<Packet>(a[r * a_row]);
      sums[r][0] = gemm::packets::pmadd(x, line[0], sums[r][0]);
      sums[r][1] = gemm::packets::pmadd(x, line[1], sums[r][1]);
    }
    ++a;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2; ++v) {
      S* const at = c + r * leading + v * kWidth;
      const Packet sum = add ? gemm::packets::padd(gemm::packets::ploadu<Packet>(at), sums[r][v]) : sums[r][v];
      gemm::packets::pstoreu(at, sum);
    }
  }
}

// sums (rows, columns) row-major = filters · source, whose row k starts at source + offsets[k].
template <class S>
void multiply_band(std::int64_t rows, std::int64_t columns, const std::vector<std::int64_t>& offsets,
                   gemm::Matrix<S> filters, const S* source, S* sums) {
  constexpr int kRows = gemm::Tile<S>::kRows, kColumns = gemm::Tile<S>::kColumns;
  static constexpr auto functions = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array{multiply_shifted<S, R + 1>...};
  }
  (std::make_integer_sequence<int, kRows>());
  const auto depth = static_cast<std::int64_t>(offsets.size());
  const std::int64_t bytes = kRows * depth * static_cast<std::int64_t>(sizeof(S));
  const std::int64_t block = std::max<std::int64_t>(gemm::kBlockBytes / bytes, 1) * kRows;
  for (std::int64_t first = 0; first < rows; first += block) {
    for (std::int64_t column = 0; column < columns; column += kColumns) {
      for (std::int64_t row = first; row < std::min(first + block, rows); row += kRows) {
        const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kRows, rows - row));
        for (std::int64_t k = 0; k < depth; k += gemm::kSum) {
          functions[count - 1](std::min(gemm::kSum, depth - k), filters.data + row * filters.row + k, filters.row,
                               offsets.data() + k, source + column, k > 0, sums + row * columns + column, columns);
        }
      }
    }
  }
}

// A thread's scratch memory.
template <class P>
struct Scratch {
  using S = Accumulate<P>;
  std::vector<std::int64_t> offsets;
  std::vector<Run> runs, rows;  // of places to read and to write
  gemm::Buffer<P> columns, packed;
  gemm::Buffer<S> sums;
};

// sums (rows, columns) row-major = filters · columns, or += with `add`. Columns are gathered in tiles, or row-major for
// bfloat16.
template <class P>
void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth, gemm::Matrix<P> filters, const P* gathered,
              bool add, Accumulate<P>* sums) {
  if constexpr (kOnTiles<P>) {
    using Size = gemm::Tile<P>;
    static const gemm::Buffer<P> zeros(kMostPlaces, P{0});
    gemm::Tiles<P, P>{.rows = rows,
                      .columns = columns,
                      .depth = depth,
                      .a = filters,
                      .a_step = Size::kRows * filters.row,
                      .b = gathered,
                      .start = zeros.data(),
                      .add = add,
                      .out = sums,
                      .leading = columns}
        .run();
  } else {
    static const std::vector<float> zeros(kMostPlaces, 0.0F);
    if (add) {
      gemm::add_product_bfloat16(rows, columns, depth, filters, {gathered, columns, 1}, sums);
    } else {
      gemm::multiply_bfloat16(rows, columns, depth, filters, {gathered, columns, 1}, zeros.data(), sums);
    }
  }
}

// Computes the result for y or x, given what is gathered and how.
template <class T, class P>
void convolve_images(const Convolution& args, const Sizes& s, bool forward) {
  using S = Accumulate<T>;
  const std::int64_t in_channels = forward ? s.x_channels : s.y_channels;
  const std::int64_t out_channels = forward ? s.y_channels : s.x_channels;
  const Images<const T> source{(forward ? args.x : args.y).data<T>(), in_channels * s.groups, forward ? s.x : s.y};
  const Images<T> out{args.out().data<T>(), out_channels * s.groups, forward ? s.y : s.x};
  const T* const weight = args.weight.data<T>();
  const T* const bias = args.bias.data_or_null<T>();

  struct Part {
    const Grid* grid;
    std::int64_t group, depth, block, blocks;
    std::vector<TapOfGrid> taps;
    Filters<P> filters;
    Band band;
  };
  constexpr std::int64_t kTile = gemm::Tile<std::conditional_t<kOnTiles<P>, P, float>>::kColumns;
  const std::vector<Grid> grids = forward ? std::vector<Grid>{s.forward_grid()} : s.backward_grids();
  std::vector<Part> parts;
  std::int64_t tasks = 0, work = 0;
  for (const Grid& grid : grids) {
    for (std::int64_t group = 0; group < s.groups; ++group) {
      const T* const of_group = weight + group * s.y_channels * s.x_channels * s.taps();
      const std::int64_t depth = in_channels * grid.taps(), columns = s.images * grid.places();
      const std::int64_t fit = kBlockElements / std::max<std::int64_t>(depth, 1) / 32 * 32;
      const std::int64_t block = std::clamp<std::int64_t>(fit, 32, kMostPlaces);
      parts.push_back({&grid,
                       group,
                       depth,
                       block,
                       ceil_div(columns, block),
                       grid.all_taps(s.filter),
                       forward ? forward_filters<P>(s, of_group) : backward_filters<P>(s, grid, of_group),
                       {}});
      Part& part = parts.back();
      if constexpr (kOnTiles<P>) {
        part.band = band_of(grid, part.taps, source.size, in_channels, out_channels, kTile);
        if (part.band.rows > 0) {
          part.blocks = s.images * ceil_div(grid.axes[1].count, part.band.rows);
        }
      }
      tasks += part.blocks;
      work += columns * std::max<std::int64_t>(depth, 1) * out_channels;
    }
  }

  // Both set scratch.rows to the places that a block computes, and scratch.sums to their sums. They return the elements
  // from the sums of a channel to those of the next.
  const auto by_columns = [&](const Part& part, std::int64_t index, Scratch<P>& scratch) {
    const Grid& grid = *part.grid;
    const std::int64_t begin = index * part.block, end = std::min(begin + part.block, s.images * grid.places());
    const std::int64_t count = end - begin, tile = kOnTiles<P> ? kTile : count;
    const std::int64_t columns = ceil_div(count, tile) * tile;
    S* const sums = gemm::grown(scratch.sums, out_channels * columns);
    const bool flat = is_flat(grid, source.size);
    find_runs(grid, flat, begin, end, tile, scratch.runs);
    find_runs(grid, grid.axes[1].step == 1 && grid.axes[2].step == 1, begin, end, columns, scratch.rows);
    if (part.depth == 0) {
      std::fill_n(sums, out_channels * columns, S{0});
    } else {
      P* const gathered = gemm::grown(scratch.columns, part.depth * columns);
      if (columns > count) {  // the rest of the last tile
        std::fill_n(gathered + (columns - tile) * part.depth, tile * part.depth, P{});
      }
      gather(grid, part.taps, source, part.group * in_channels, 0, part.depth, flat, scratch.runs, tile, gathered);
      multiply<P>(out_channels, columns, part.depth, part.filters.matrix, gathered, false, sums);
    }
    return columns;
  };
  const auto by_band = [&](const Part& part, std::int64_t index, Scratch<P>& scratch) {
    const Grid& grid = *part.grid;
    const Band& band = part.band;
    const std::int64_t bands = ceil_div(grid.axes[1].count, band.rows);
    const std::int64_t image = index / bands, first = index % bands * band.rows;
    const std::int64_t rows = std::min(band.rows, grid.axes[1].count - first);
    const std::int64_t columns = band.columns(grid.axes[2].count, kTile);
    P* const padded = gemm::grown(scratch.columns, band_size(band, in_channels, rows, columns));
    copy_band(band, grid, source, image, part.group * in_channels, in_channels, first, rows, columns, padded,
              scratch.offsets);
    scratch.rows.clear();
    for (std::int64_t row = 0; row < rows; ++row) {
      scratch.rows.push_back({image, 0, first + row, 0, grid.axes[2].count, row * band.pitch, 0});
    }
    S* const sums = gemm::grown(scratch.sums, out_channels * columns);
    if constexpr (kOnTiles<P>) {
      multiply_band<P>(out_channels, columns, scratch.offsets, part.filters.matrix, padded, sums);
    }
    return columns;
  };
  const auto run = [&](const Part& part, std::int64_t index, Scratch<P>& scratch) {
    const Grid& grid = *part.grid;
    const std::int64_t columns = part.band.rows > 0 ? by_band(part, index, scratch) : by_columns(part, index, scratch);
    const S* const sums = scratch.sums.data();
    for (std::int64_t channel = 0; channel < out_channels; ++channel) {
      const std::int64_t at = part.group * out_channels + channel;
      const S start = bias == nullptr ? S{0} : static_cast<S>(bias[at]);
      for (const Run& places : scratch.rows) {
        const S* const from = sums + channel * columns + places.column;
        const std::int64_t z = grid.axes[0].first + places.z * grid.axes[0].step;
        const std::int64_t y = grid.axes[1].first + places.y * grid.axes[1].step;
        const std::int64_t step = grid.axes[2].step;
        T* const to =
            out.at(places.image, at) + (z * out.size[1] + y) * out.size[2] + grid.axes[2].first + places.x * step;
        if (step == 1) {
          write_run(from, start, places.length, to);
        } else {
          for (std::int64_t i = 0; i < places.length; ++i) {
            to[i * step] = static_cast<T>(from[i] + start);
          }
        }
      }
    }
  };
  parallel_for(tasks, gemm::kMultiplyGrain / (work / tasks + 1) + 1, [&](std::int64_t begin, std::int64_t end) {
    static thread_local Scratch<P> scratch;
    std::int64_t before = 0;
    for (const Part& part : parts) {
      for (std::int64_t task = std::max(begin, before); task < std::min(end, before + part.blocks); ++task) {
        run(part, task - before, scratch);
      }
      before += part.blocks;
    }
  });
}

// The gradient by the weight: for each group and block of its columns (c, tap), the sum over images of
// y (K, places) · gathered columnsᵀ (places, c · taps). A small gradient is summed in parts, each of some images.
template <class T, class P>
void convolve_weight(const Convolution& args, const Sizes& s) {
  using S = Accumulate<T>;
  const Grid grid = s.forward_grid();
  const bool flat = is_flat(grid, s.x);
  const std::vector<TapOfGrid> all_taps = grid.all_taps(s.filter);
  const std::int64_t taps = s.taps(), depth = s.x_channels * taps, places = grid.places(), rows = s.y_channels;
  const Images<const T> x{args.x.data<T>(), s.x_channels * s.groups, s.x};
  const Images<const T> y{args.y.data<T>(), s.y_channels * s.groups, s.y};
  T* const out = args.weight.data<T>();
  constexpr std::int64_t kColumns = 128;
  const std::int64_t blocks = ceil_div(depth, kColumns), weights = s.groups * rows * depth;
  const std::int64_t images_each =
      weights <= kFewWeights ? ceil_div(s.images, std::min(s.images, kParts)) : std::max<std::int64_t>(s.images, 1);
  const std::int64_t parts = ceil_div(s.images, images_each);
  const std::int64_t chunk_size = std::min(places, kBlockElements / std::min(kColumns, depth) / 32 * 32);
  const std::int64_t chunks = ceil_div(places, chunk_size);
  std::vector<S> partial(parts > 1 ? parts * weights : 0);

  const auto run = [&](std::int64_t part, std::int64_t group, std::int64_t block, Scratch<P>& scratch) {
    const std::int64_t first = block * kColumns, columns = std::min(kColumns, depth - first);
    S* const sums = gemm::grown(scratch.sums, rows * columns);
    const std::int64_t begin = part * images_each, end = std::min(begin + images_each, s.images);
    for (std::int64_t chunk = 0; chunk < (end - begin) * chunks; ++chunk) {
      const std::int64_t image = begin + chunk / chunks, from = chunk % chunks * chunk_size;
      const std::int64_t count = std::min(chunk_size, places - from);
      find_runs(grid, flat, image * places + from, image * places + from + count, count, scratch.runs);
      P* const gathered = gemm::grown(scratch.columns, columns * count);
      gather(grid, all_taps, x, group * s.x_channels, first, first + columns, flat, scratch.runs, count, gathered);
      const T* const dy = y.at(image, group * rows) + from;
      if constexpr (kOnTiles<P>) {
        using Size = gemm::Tile<P>;
        const std::int64_t tiles = ceil_div(columns, Size::kColumns);
        const std::int64_t row = padded_row<P>(count);
        P* const packed = gemm::grown(scratch.packed, tiles * Size::kColumns * count + rows * row);
        for (std::int64_t t = 0; t < tiles; ++t) {
          const auto valid = static_cast<int>(std::min<std::int64_t>(Size::kColumns, columns - t * Size::kColumns));
          const int width = valid <= Size::kWidth ? Size::kWidth : Size::kColumns;
          gemm::pack_columns<P, P>({gathered + t * Size::kColumns * count, 1, count}, count, valid, width,
                                   packed + t * Size::kColumns * count);
        }
        gemm::Matrix<P> left;
        if constexpr (std::is_same_v<P, T>) {
          left = {dy, places, 1};
        }
        if (!std::is_same_v<P, T> || !gemm::a_is_direct<P>(left)) {
          P* const copy = packed + tiles * Size::kColumns * count;
          for (std::int64_t k = 0; k < rows; ++k) {
            copy_run(dy + k * places, count, copy + k * row);
          }
          left = {copy, row, 1};
        }
        multiply<P>(rows, columns, count, left, packed, chunk > 0, sums);
      } else {
        if (chunk == 0) {
          std::fill_n(sums, rows * columns, 0.0F);
        }
        gemm::add_product_bfloat16(rows, columns, count, {dy, places, 1}, {gathered, 1, count}, sums);
      }
    }
    for (std::int64_t k = 0; k < rows; ++k) {
      const std::int64_t at = (group * rows + k) * depth + first;
      if (parts > 1) {
        std::copy_n(sums + k * columns, columns, partial.data() + part * weights + at);
      } else {
        std::transform(sums + k * columns, sums + (k + 1) * columns, out + at,
                       [](S sum) { return static_cast<T>(sum); });
      }
    }
  };
  const std::int64_t tasks = parts * s.groups * blocks;
  const std::int64_t work = images_each * places * rows * std::min(kColumns, depth);
  parallel_for(tasks, gemm::kMultiplyGrain / (work + 1) + 1, [&](std::int64_t begin, std::int64_t end) {
    static thread_local Scratch<P> scratch;
    for (std::int64_t task = begin; task < end; ++task) {
      run(task / blocks / s.groups, task / blocks % s.groups, task % blocks, scratch);
    }
  });
  if (parts > 1) {
    parallel_for(weights, gemm::kPackGrain / parts, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        S sum = 0;
        for (std::int64_t part = 0; part < parts; ++part) {
          sum += partial[part * weights + i];
        }
        out[i] = static_cast<T>(sum);
      }
    });
  }
}

// Σ a[i] · b[i], in lanes that vectorize.
template <class S>
S dot(const S* a, const S* b, std::int64_t count) {
  constexpr std::int64_t kLanes = 32;
  std::array<S, kLanes> lanes{};
  for (std::int64_t i = 0; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += a[i + lane] * b[i + lane];
    }
  }
  S sum = 0;
  for (std::int64_t i = count / kLanes * kLanes; i < count; ++i) {
    sum += a[i] * b[i];
  }
  for (const S lane : lanes) {
    sum += lane;
  }
  return sum;
}

// The gradient by the weight if each group has one channel: dot products of planes.
template <class T>
void depthwise_weight(const Convolution& args, const Sizes& s, const Grid& grid, const Band& band) {
  using S = Accumulate<T>;
  const Images<const T> x{args.x.data<T>(), s.groups, s.x}, y{args.y.data<T>(), s.groups, s.y};
  const std::int64_t height = s.y[1], width = s.y[2], columns = (band.rows - 1) * band.pitch + width;
  T* const out = args.weight.data<T>();
  const auto of_channel = [&](std::int64_t channel, Scratch<S>& scratch) {
    std::vector<double> sums(band.taps.size());
    for (std::int64_t image = 0; image < s.images; ++image) {
      for (std::int64_t first = 0; first < height; first += band.rows) {
        const std::int64_t rows = std::min(band.rows, height - first);
        S* const padded = gemm::grown(scratch.columns, band_size(band, 1, rows, columns));
        copy_band(band, grid, x, image, channel, 1, first, rows, columns, padded, scratch.offsets);
        S* const dy = gemm::grown(scratch.sums, rows * band.pitch);
        for (std::int64_t row = 0; row < rows; ++row) {
          copy_run(y.at(image, channel) + (first + row) * width, width, dy + row * band.pitch);
          std::fill(dy + row * band.pitch + width, dy + (row + 1) * band.pitch, S{0});
        }
        for (std::size_t tap = 0; tap < sums.size(); ++tap) {
          sums[tap] += static_cast<double>(dot<S>(dy, padded + scratch.offsets[tap], (rows - 1) * band.pitch + width));
        }
      }
    }
    std::transform(sums.begin(), sums.end(), out + channel * s.taps(),
                   [](double sum) { return static_cast<T>(static_cast<S>(sum)); });
  };
  const std::int64_t work = s.images * height * width * s.taps();
  parallel_for(s.groups, gemm::kMultiplyGrain / 4 / (work + 1) + 1, [&](std::int64_t begin, std::int64_t end) {
    static thread_local Scratch<S> scratch;
    for (std::int64_t channel = begin; channel < end; ++channel) {
      of_channel(channel, scratch);
    }
  });
}

template <class T, class P>
void convolve(const Convolution& args) {
  const Sizes sizes(args.geometry);
  const bool depthwise = sizes.x_channels == 1 && sizes.y_channels == 1 && sizes.groups > 1;
  if (depthwise && !std::is_same_v<P, Accumulate<T>>) {
    convolve<T, Accumulate<T>>(args);  // nothing for AMX
    return;
  }
  if (args.result != ConvPart::weight) {
    convolve_images<T, P>(args, sizes, args.result == ConvPart::y);
    return;
  }
  if (depthwise) {
    const Grid grid = sizes.forward_grid();
    const Band band = band_of(grid, grid.all_taps(sizes.filter), sizes.x, 1, 1, 1);
    if (band.rows > 0) {
      depthwise_weight<T>(args, sizes, grid, band);
      return;
    }
  }
  convolve_weight<T, P>(args, sizes);
}

}  // namespace

void convolve(Cpu device, const Convolution& args) {
  if (args.geometry.x[0] == 0 || args.geometry.weight[1] == 0 || args.geometry.weight[0] == 0) {
    composed_convolve(args);  // sums of nothing
    return;
  }
  Convolution dense = args;
  const Tensor& out = args.out();
  const bool direct = out.is_contiguous();
  const Tensor to = direct ? out : empty(out.shape(), out.dtype());
  for (Tensor* const x : {&dense.x, &dense.weight, &dense.y}) {
    *x = x->is_same(out) ? to : contiguous_data(*x);
  }
  on_dtype(FloatTypes{}, out.dtype(), "conv", [&]<class T>() {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (gemm::bfloat16_unit() != gemm::Bfloat16Unit::none) {
        convolve<T, T>(dense);
        return;
      }
    }
    convolve<T, Accumulate<T>>(dense);
  });
  activate(device, args.activation, to, to);
  if (!direct) {
    copy_into(out, to);
  }
}

}  // namespace mica::kernels
