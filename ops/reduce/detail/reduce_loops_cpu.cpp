#include <bit>
#include <vector>

#include <mica/core/blocks_cpu.h>
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

// The case that a result's elements are adjacent in memory: reduces result by result.
void reduce_rows(const ReduceSteps& steps, const ReducePlan& plan, const Source& x, const Sink& y) {
  constexpr std::int64_t kGroup = 65536;
  const ReducePlan::Axis& run = plan.reduced.inner();
  const std::int64_t leaves_per_run = (run.size + kLeaf - 1) / kLeaf;
  const std::int64_t leaves = run.size == 0 ? 0 : plan.reduced.numel / run.size * leaves_per_run;
  const std::int64_t group = std::max<std::int64_t>(kGroup / std::clamp<std::int64_t>(run.size, 1, kLeaf), 1);
  const std::int64_t groups = std::max<std::int64_t>((leaves + group - 1) / group, 1);

  // How many runs to reduce in one call, if `rest` runs follow run `index` and `done` runs are in the cascade: a power
  // of two, so that they form a subtree of the cascade.
  const std::int64_t at_once = x.rows_at_once(run.size);
  const auto runs_together = [&](std::int64_t index, std::int64_t done, std::int64_t rest) -> std::int64_t {
    if (leaves_per_run != 1) {
      return 1;
    }
    // There are several runs, since reduce_short_rows() reduces single ones. So there is another reduced axis.
    const std::int64_t neighbors = plan.reduced.axis[plan.reduced.rank - 2].size;
    const std::int64_t most = std::min({at_once, rest, neighbors - index % neighbors});
    const auto runs = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(most)));
    return done == 0 ? runs : std::min(runs, done & -done);
  };
  // Reduces a group of leaves, which belongs to the result at `at`, into *acc.
  const auto reduce_group = [&](std::int64_t which, const ReduceOffsets& at, void* acc) {
    Levels<1> levels;
    auto cascade = levels.cascade(steps, 1);
    alignas(64) std::byte buffer[kLeaf * sizeof(std::int64_t)];
    alignas(64) std::byte accs[kRows * kAccBytes];
    std::byte* const result = cascade.next();
    const std::int64_t begin = which * group;
    const std::int64_t end = std::min(leaves, begin + group);
    for (std::int64_t leaf = begin; leaf < end;) {
      const std::int64_t run_index = leaf / leaves_per_run;
      const std::int64_t start = leaf % leaves_per_run * kLeaf;
      const std::int64_t from = at.in + ReduceOffsets(plan.reduced, run_index, 1).in + start * run.in;
      const std::int64_t runs = runs_together(run_index, leaf - begin, end - leaf);
      Patch patch{std::min(kLeaf, run.size - start), run.in, runs,
                  runs == 1 ? 0 : plan.reduced.axis[plan.reduced.rank - 2].in};
      const std::byte* const values = x.values(from, patch, buffer);
      steps.rows(values, patch, at.out, 0, run_index * run.size + start, run.size, accs);
      if (runs > 1) {
        steps.fold(accs, runs);
      }
      std::copy_n(accs, steps.acc_bytes, cascade.next());
      cascade.push(runs);
      leaf += runs;
    }
    if (cascade.empty()) {
      steps.identity(result, 1);
    }
    cascade.finish();
    std::copy_n(result, steps.acc_bytes, static_cast<std::byte*>(acc));
  };

  const std::int64_t rows = plan.kept.numel;
  if (groups == 1) {
    const std::int64_t grain = std::max<std::int64_t>(kReduceGrain / std::max<std::int64_t>(plan.reduced.numel, 1), 1);
    parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
      if (leaves == 1) {
        reduce_short_rows(steps, plan, x, y, begin, end);
        return;
      }
      for (std::int64_t row = begin; row < end; ++row) {
        const ReduceOffsets at(plan.kept, row);
        alignas(kAccBytes) std::byte acc[kAccBytes];
        reduce_group(0, at, acc);
        y.write(steps, acc, 1, at.out, 1);
      }
    });
    return;
  }
  std::vector<std::byte> partials(rows * groups * kAccBytes);
  parallel_for(rows * groups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      reduce_group(i % groups, ReduceOffsets(plan.kept, i / groups), partials.data() + i * kAccBytes);
    }
  });
  for (std::int64_t row = 0; row < rows; ++row) {
    Levels<1> levels;
    auto cascade = levels.cascade(steps, 1);
    std::byte* const result = cascade.next();
    for (std::int64_t i = 0; i < groups; ++i) {
      std::copy_n(partials.data() + (row * groups + i) * kAccBytes, steps.acc_bytes, cascade.next());
      cascade.push();
    }
    cascade.finish();
    y.write(steps, result, 1, ReduceOffsets(plan.kept, row).out, 1);
  }
}

// The case that elements of different results are adjacent in memory, so that the innermost kept axis has stride 1 in
// x: reduces tiles of columns, row by row.
void reduce_columns(const ReduceSteps& steps, const ReducePlan& plan, const Source& x, const Sink& y) {
  constexpr std::int64_t kTile = kReduceTile;
  constexpr std::int64_t kLeafRows = 32;
  constexpr std::int64_t kMaxGroups = 64;

  const ReducePlan::Axis columns = plan.kept.inner();
  const std::int64_t rows = plan.reduced.numel;
  const std::int64_t group =
      std::max<std::int64_t>((rows / kMaxGroups + kLeafRows - 1) / kLeafRows * kLeafRows, 4 * kLeafRows);
  const std::int64_t groups = std::max<std::int64_t>((rows + group - 1) / group, 1);
  const std::int64_t tiles = (columns.size + kTile - 1) / kTile;
  const std::int64_t outer = plan.kept.numel / columns.size;
  const std::int64_t tile_bytes = std::min(kTile, columns.size) * steps.acc_bytes;

  struct Place {
    std::int64_t in, out, width;
  };
  const auto place_of = [&](std::int64_t block) {
    const ReduceOffsets at(plan.kept, block / tiles, 1);
    const std::int64_t first = block % tiles * kTile;
    return Place{at.in + first, at.out + first * columns.out, std::min(kTile, columns.size - first)};
  };
  // Reduces rows [begin, end) of the columns at `place` into *acc.
  const auto reduce_leaf_of = [&](const Place& place, std::int64_t begin, std::int64_t end, const void* shifts,
                                  void* acc) {
    alignas(64) std::byte buffers[4][kTile * sizeof(std::int64_t)];
    steps.identity(acc, place.width);
    for (std::int64_t row = begin; row < end;) {
      const int count = row + 4 <= end ? 4 : 1;
      std::array<const void*, 4> values{};
      for (int i = 0; i < count; ++i) {
        Patch patch{place.width, 1, 1, 0};
        values[i] = x.values(place.in + ReduceOffsets(plan.reduced, row + i).in, patch, buffers[i]);
      }
      steps.columns(values.data(), count, place.width, row, shifts, acc);
      row += count;
    }
  };

  const std::int64_t blocks = outer * tiles;
  std::vector<std::byte> partials(groups > 1 ? blocks * groups * tile_bytes : 0);
  const std::int64_t work = std::max<std::int64_t>(std::min(rows, group) * std::min(columns.size, kTile), 1);
  parallel_for(blocks * groups, std::max<std::int64_t>(kReduceGrain / work, 1),
               [&](std::int64_t begin, std::int64_t end) {
                 alignas(64) std::byte shifts[kTile * kShiftBytes];
                 Levels<kTile> levels;
                 for (std::int64_t i = begin; i < end; ++i) {
                   const Place place = place_of(i / groups);
                   steps.load_shifts(place.out, columns.out, place.width, shifts);
                   auto cascade = levels.cascade(steps, place.width);
                   std::byte* const result = cascade.next();
                   const std::int64_t first = i % groups * group;
                   const std::int64_t last = std::min(rows, first + group);
                   for (std::int64_t row = first; row < last; row += kLeafRows) {
                     reduce_leaf_of(place, row, std::min(last, row + kLeafRows), shifts, cascade.next());
                     cascade.push();
                   }
                   if (cascade.empty()) {
                     steps.identity(result, place.width);
                   }
                   cascade.finish();
                   if (groups == 1) {
                     y.write(steps, result, place.width, place.out, columns.out);
                   } else {
                     std::copy_n(result, place.width * steps.acc_bytes, partials.data() + i * tile_bytes);
                   }
                 }
               });
  if (groups > 1) {
    Levels<kTile> levels;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const Place place = place_of(block);
      auto cascade = levels.cascade(steps, place.width);
      std::byte* const result = cascade.next();
      for (std::int64_t i = 0; i < groups; ++i) {
        std::copy_n(partials.data() + (block * groups + i) * tile_bytes, place.width * steps.acc_bytes, cascade.next());
        cascade.push();
      }
      cascade.finish();
      y.write(steps, result, place.width, place.out, columns.out);
    }
  }
}

}  // namespace

void run_reduction(const ReduceSteps& steps, const Tensor& x, const Tensor& y) {
  const ReducePlan plan(x, y);
  const Source source(x, steps.value);
  const Sink sink(y, steps.out);
  const bool side_by_side = plan.kept.inner().in == 1 && plan.kept.inner().size >= 8;
  if (side_by_side && plan.reduced.inner().in != 1) {
    reduce_columns(steps, plan, source, sink);
  } else {
    reduce_rows(steps, plan, source, sink);
  }
}

}  // namespace mica::kernels::detail
