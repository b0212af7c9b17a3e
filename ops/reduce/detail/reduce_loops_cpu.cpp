#include <bit>
#include <vector>

#include <mica/core/detail/blocks_cpu.h>
#include <mica/ops/reduce/detail/cascade.h>
#include <mica/ops/reduce/detail/reduce_cpu.h>

namespace mica::kernels::detail {

namespace {

constexpr std::int64_t kReduceGrain = 16384;  // minimum elements per thread
constexpr std::int64_t kLeaf = 4096;          // maximum elements of a row per call
constexpr std::int64_t kRows = 64;            // maximum rows per call; a power of two

// The elements of a tensor as values of a dtype.
class Source {
 public:
  Source(const Tensor& x, DType value)
      : data_(x.raw_data()), format_(element_format(x.dtype())), same_(x.dtype() == value) {
    check(same_ || (value == DType::float32 && format_.converts()), "reduce: cannot read {} as {}", x.dtype(), value);
  }

  /// The most rows of n elements that values() returns at once.
  std::int64_t rows_at_once(std::int64_t n) const {
    return same_ ? kRows : std::clamp<std::int64_t>(kLeaf / std::max<std::int64_t>(n, 1), 1, kRows);
  }
  /// The elements of the patch that starts at `offset`: in place if possible, else converted into `buffer`, without
  /// gaps; then updates the patch's strides.
  const std::byte* values(std::int64_t offset, Patch& patch, std::byte* buffer) const {
    if (same_) {
      return at(offset);
    }
    format_.gather(at(offset), patch, buffer);
    patch.stride = 1;
    patch.row_stride = patch.n;
    return buffer;
  }

 private:
  const std::byte* at(std::int64_t offset) const { return data_ + offset * format_.bytes; }

  const std::byte* data_;
  const ElementFormat& format_;
  bool same_;
};

// The output of a reduction.
class Sink {
 public:
  Sink(const Tensor& y, DType value)
      : data_(y.raw_data()), format_(element_format(y.dtype())), same_(y.dtype() == value) {
    check(same_ || (value == DType::float32 && format_.converts()), "reduce: cannot write {} as {}", value, y.dtype());
  }

  /// Writes the results at out, out + stride, ….
  void write(const ReduceSteps& steps, const void* acc, std::int64_t width, std::int64_t out,
             std::int64_t stride) const {
    if (same_) {
      steps.finish(acc, width, out, stride, data_ + out * format_.bytes, stride);
      return;
    }
    alignas(64) std::byte buffer[kReduceTile * kOutBytes];
    steps.finish(acc, width, out, stride, buffer, 1);
    format_.scatter(buffer, {width, stride, 1, 0}, data_ + out * format_.bytes);
  }

 private:
  std::byte* data_;
  const ElementFormat& format_;
  bool same_;
};

// The accumulators of a cascade: up to kWidth per level.
template <std::int64_t kWidth>
class Levels {
 public:
  auto cascade(const ReduceSteps& steps, std::int64_t width) {
    const auto combine = [&steps, width](std::byte* left, const std::byte* right) {
      steps.combine(left, right, width);
    };
    return Cascade(bytes_, width * steps.acc_bytes, combine);
  }

 private:
  alignas(64) std::byte bytes_[kCascadeLevels * kWidth * kAccBytes];
};

// Reduces rows [begin, end), which are so short that each is a single leaf.
void reduce_short_rows(const ReduceSteps& steps, const ReducePlan& plan, const Source& x, const Sink& y,
                       std::int64_t begin, std::int64_t end) {
  alignas(64) std::byte buffer[kLeaf * sizeof(std::int64_t)];
  alignas(64) std::byte acc[kRows * kAccBytes];
  const ReducePlan::Axis& run = plan.reduced.inner();
  const ReducePlan::Axis& neighbors = plan.kept.inner();
  while (begin < end) {
    const ReduceOffsets at(plan.kept, begin);
    const std::int64_t rest = std::min(end - begin, neighbors.size - begin % neighbors.size);
    Patch patch{run.size, run.in, std::min(rest, x.rows_at_once(run.size)), neighbors.in};
    const std::byte* const values = x.values(at.in, patch, buffer);
    steps.rows(values, patch, at.out, neighbors.out, 0, 0, acc);
    y.write(steps, acc, patch.rows, at.out, neighbors.out);
    begin += patch.rows;
  }
}

// Merges `count` partial results of `width` accumulators each and writes them.
template <std::int64_t kWidth>
void merge_partials(const ReduceSteps& steps, const Sink& y, const std::byte* partials, std::int64_t count,
                    std::int64_t distance, std::int64_t width, std::int64_t out, std::int64_t stride) {
  Levels<kWidth> levels;
  auto cascade = levels.cascade(steps, width);
  std::byte* const result = cascade.next();
  for (std::int64_t i = 0; i < count; ++i) {
    std::copy_n(partials + i * distance, width * steps.acc_bytes, cascade.next());
    cascade.push();
  }
  cascade.finish();
  y.write(steps, result, width, out, stride);
}

// Reduces result by result, if a result's elements are adjacent in memory. Its leaves form groups, which are split
// among threads.
class RowReduction {
 public:
  RowReduction(const ReduceSteps& steps, const ReducePlan& plan, const Source& x, const Sink& y)
      : steps_(steps), plan_(plan), x_(x), y_(y) {}

  void run() const {
    if (groups_ == 1) {
      const std::int64_t grain =
          std::max<std::int64_t>(kReduceGrain / std::max<std::int64_t>(plan_.reduced.numel, 1), 1);
      parallel_for(plan_.kept.numel, grain, [&](std::int64_t begin, std::int64_t end) { reduce_rows(begin, end); });
      return;
    }
    const std::int64_t rows = plan_.kept.numel;
    std::vector<std::byte> partials(rows * groups_ * kAccBytes);
    parallel_for(rows * groups_, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        reduce_group(i % groups_, ReduceOffsets(plan_.kept, i / groups_), partials.data() + i * kAccBytes);
      }
    });
    for (std::int64_t row = 0; row < rows; ++row) {
      merge_partials<1>(steps_, y_, partials.data() + row * groups_ * kAccBytes, groups_, kAccBytes, 1,
                        ReduceOffsets(plan_.kept, row).out, 1);
    }
  }

 private:
  static constexpr std::int64_t kGroup = 65536;  // elements

  // Reduces whole rows of one group each.
  void reduce_rows(std::int64_t begin, std::int64_t end) const {
    if (leaves_ == 1) {
      reduce_short_rows(steps_, plan_, x_, y_, begin, end);
      return;
    }
    for (std::int64_t row = begin; row < end; ++row) {
      const ReduceOffsets at(plan_.kept, row);
      alignas(kAccBytes) std::byte acc[kAccBytes];
      reduce_group(0, at, acc);
      y_.write(steps_, acc, 1, at.out, 1);
    }
  }

  // How many runs to reduce in one call, if `rest` runs follow run `index` and `done` runs are in the cascade: a power
  // of two, so that they are a subtree of the cascade.
  std::int64_t runs_together(std::int64_t index, std::int64_t done, std::int64_t rest) const {
    if (leaves_per_run_ != 1) {
      return 1;
    }
    // There is another reduced axis, since reduce_short_rows() reduces single runs.
    const std::int64_t neighbors = plan_.reduced.axis[plan_.reduced.rank - 2].size;
    const std::int64_t most = std::min({x_.rows_at_once(run_.size), rest, neighbors - index % neighbors});
    const auto runs = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(most)));
    return done == 0 ? runs : std::min(runs, done & -done);
  }

  // Reduces a group of leaves, which belongs to the result at `at`, into *acc.
  void reduce_group(std::int64_t which, const ReduceOffsets& at, void* acc) const {
    Levels<1> levels;
    auto cascade = levels.cascade(steps_, 1);
    alignas(64) std::byte buffer[kLeaf * sizeof(std::int64_t)];
    alignas(64) std::byte accs[kRows * kAccBytes];
    std::byte* const result = cascade.next();
    const std::int64_t begin = which * group_;
    const std::int64_t end = std::min(leaves_, begin + group_);
    for (std::int64_t leaf = begin; leaf < end;) {
      const std::int64_t run_index = leaf / leaves_per_run_;
      const std::int64_t start = leaf % leaves_per_run_ * kLeaf;
      const std::int64_t from = at.in + ReduceOffsets(plan_.reduced, run_index, 1).in + start * run_.in;
      const std::int64_t runs = runs_together(run_index, leaf - begin, end - leaf);
      Patch patch{std::min(kLeaf, run_.size - start), run_.in, runs,
                  runs == 1 ? 0 : plan_.reduced.axis[plan_.reduced.rank - 2].in};
      const std::byte* const values = x_.values(from, patch, buffer);
      steps_.rows(values, patch, at.out, 0, run_index * run_.size + start, run_.size, accs);
      if (runs > 1) {
        steps_.fold(accs, runs);
      }
      std::copy_n(accs, steps_.acc_bytes, cascade.next());
      cascade.push(runs);
      leaf += runs;
    }
    if (cascade.empty()) {
      steps_.identity(result, 1);
    }
    cascade.finish();
    std::copy_n(result, steps_.acc_bytes, static_cast<std::byte*>(acc));
  }

  const ReduceSteps& steps_;
  const ReducePlan& plan_;
  const Source& x_;
  const Sink& y_;
  const ReducePlan::Axis run_ = plan_.reduced.inner();
  const std::int64_t leaves_per_run_ = (run_.size + kLeaf - 1) / kLeaf;
  const std::int64_t leaves_ = run_.size == 0 ? 0 : plan_.reduced.numel / run_.size * leaves_per_run_;
  const std::int64_t group_ =
      std::max<std::int64_t>(kGroup / std::clamp<std::int64_t>(run_.size, 1, kLeaf), 1);  // leaves
  const std::int64_t groups_ = std::max<std::int64_t>((leaves_ + group_ - 1) / group_, 1);
};

// Reduces tiles of columns, row by row, if the innermost kept axis has stride 1 in x. The rows of a tile form groups,
// which are split among threads.
class ColumnReduction {
 public:
  ColumnReduction(const ReduceSteps& steps, const ReducePlan& plan, const Source& x, const Sink& y)
      : steps_(steps), plan_(plan), x_(x), y_(y) {}

  void run() const {
    const std::int64_t blocks = plan_.kept.numel / columns_.size * tiles_;
    const std::int64_t tile_bytes = std::min(kTile, columns_.size) * steps_.acc_bytes;
    std::vector<std::byte> partials(groups_ > 1 ? blocks * groups_ * tile_bytes : 0);
    const std::int64_t work = std::max<std::int64_t>(std::min(rows_, group_) * std::min(columns_.size, kTile), 1);
    parallel_for(blocks * groups_, std::max<std::int64_t>(kReduceGrain / work, 1),
                 [&](std::int64_t begin, std::int64_t end) {
                   Levels<kTile> levels;
                   for (std::int64_t i = begin; i < end; ++i) {
                     reduce_group(i, levels, groups_ == 1 ? nullptr : partials.data() + i * tile_bytes);
                   }
                 });
    for (std::int64_t block = 0; groups_ > 1 && block < blocks; ++block) {
      const ColumnTile tile = tile_of(block);
      merge_partials<kTile>(steps_, y_, partials.data() + block * groups_ * tile_bytes, groups_, tile_bytes, tile.width,
                            tile.out, columns_.out);
    }
  }

 private:
  static constexpr std::int64_t kTile = kReduceTile;
  static constexpr std::int64_t kLeafRows = 32;
  static constexpr std::int64_t kMaxGroups = 64;

  struct ColumnTile {
    std::int64_t in, out, width;
  };
  ColumnTile tile_of(std::int64_t block) const {
    const ReduceOffsets at(plan_.kept, block / tiles_, 1);
    const std::int64_t first = block % tiles_ * kTile;
    return {at.in + first, at.out + first * columns_.out, std::min(kTile, columns_.size - first)};
  }

  // Reduces group number i of all tiles, into `partial` or, if that is null, the output.
  void reduce_group(std::int64_t i, Levels<kTile>& levels, std::byte* partial) const {
    alignas(64) std::byte shifts[kTile * kShiftBytes];
    const ColumnTile tile = tile_of(i / groups_);
    steps_.load_shifts(tile.out, columns_.out, tile.width, shifts);
    auto cascade = levels.cascade(steps_, tile.width);
    std::byte* const result = cascade.next();
    const std::int64_t first = i % groups_ * group_;
    const std::int64_t last = std::min(rows_, first + group_);
    for (std::int64_t row = first; row < last; row += kLeafRows) {
      reduce_leaf_of(tile, row, std::min(last, row + kLeafRows), shifts, cascade.next());
      cascade.push();
    }
    if (cascade.empty()) {
      steps_.identity(result, tile.width);
    }
    cascade.finish();
    if (partial == nullptr) {
      y_.write(steps_, result, tile.width, tile.out, columns_.out);
    } else {
      std::copy_n(result, tile.width * steps_.acc_bytes, partial);
    }
  }

  // Reduces rows [begin, end) of a tile into *acc.
  void reduce_leaf_of(const ColumnTile& tile, std::int64_t begin, std::int64_t end, const void* shifts,
                      void* acc) const {
    alignas(64) std::byte buffers[4][kTile * sizeof(std::int64_t)];
    steps_.identity(acc, tile.width);
    for (std::int64_t row = begin; row < end;) {
      const int count = row + 4 <= end ? 4 : 1;
      std::array<const void*, 4> values{};
      for (int i = 0; i < count; ++i) {
        Patch patch{tile.width, 1, 1, 0};
        values[i] = x_.values(tile.in + ReduceOffsets(plan_.reduced, row + i).in, patch, buffers[i]);
      }
      steps_.columns(values.data(), count, tile.width, row, shifts, acc);
      row += count;
    }
  }

  const ReduceSteps& steps_;
  const ReducePlan& plan_;
  const Source& x_;
  const Sink& y_;
  const ReducePlan::Axis columns_ = plan_.kept.inner();
  const std::int64_t rows_ = plan_.reduced.numel;
  const std::int64_t group_ =
      std::max<std::int64_t>((rows_ / kMaxGroups + kLeafRows - 1) / kLeafRows * kLeafRows, 4 * kLeafRows);  // rows
  const std::int64_t groups_ = std::max<std::int64_t>((rows_ + group_ - 1) / group_, 1);
  const std::int64_t tiles_ = (columns_.size + kTile - 1) / kTile;
};

}  // namespace

void run_reduction(const ReduceSteps& steps, const Tensor& x, const Tensor& y) {
  const ReducePlan plan(x, y);
  const Source source(x, steps.value);
  const Sink sink(y, steps.out);
  const bool side_by_side = plan.kept.inner().in == 1 && plan.kept.inner().size >= 8;
  if (side_by_side && plan.reduced.inner().in != 1) {
    ColumnReduction(steps, plan, source, sink).run();
  } else {
    RowReduction(steps, plan, source, sink).run();
  }
}

}  // namespace mica::kernels::detail
