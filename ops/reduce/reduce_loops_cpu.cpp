#include <vector>

#include <mica/core/blocks_cpu.h>
#include <mica/ops/reduce/cascade.h>
#include <mica/ops/reduce/reduce_cpu.h>

namespace mica::kernels::detail {

namespace {

constexpr std::int64_t kReduceGrain = 16384;  // elements per thread, at least

// The elements of a tensor as values of a dtype.
class Source {
 public:
  Source(const Tensor& x, DType value)
      : value_bytes(static_cast<std::int64_t>(size_of(value))),
        data_(x.raw_data()),
        format_(element_format(x.dtype())),
        same_(x.dtype() == value) {
    check(same_ || (value == DType::float32 && format_.converts()), "reduce: cannot read {} as {}", x.dtype(), value);
  }

  const std::int64_t value_bytes;

  /// Whether elements are read in place.
  bool in_place() const { return same_; }
  const std::byte* at(std::int64_t offset) const { return data_ + offset * format_.bytes; }
  void load(std::int64_t offset, const Patch& patch, std::byte* to) const { format_.gather(at(offset), patch, to); }
  /// The n elements from `offset` on, `stride` apart: in place if possible, else loaded into `buffer` side by side.
  const std::byte* values(std::int64_t offset, std::int64_t stride, std::int64_t n, std::byte* buffer) const {
    if (same_) {
      return at(offset);
    }
    load(offset, {n, stride, 1, 0}, buffer);
    return buffer;
  }

 private:
  const std::byte* data_;
  const ElementFormat& format_;
  bool same_;
};

// The levels of accumulators, `width` in each.
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

constexpr std::int64_t kLeaf = 4096;

// Reduces rows [begin, end), each of which is one leaf. They are loaded several at a time.
void reduce_short_rows(const ReduceSteps& steps, const ReducePlan& plan, const Source& x, std::int64_t begin,
                       std::int64_t end) {
  alignas(64) std::byte buffer[kLeaf * sizeof(std::int64_t)];
  alignas(kAccBytes) std::byte acc[kAccBytes];
  const ReducePlan::Axis& run = plan.reduced.inner();
  const ReducePlan::Axis& neighbors = plan.kept.inner();
  const bool in_place = x.in_place();
  const std::int64_t stride = in_place ? run.in : 1;
  while (begin < end) {
    const ReduceOffsets at(plan.kept, begin);
    const std::int64_t rest = std::min(end - begin, neighbors.size - begin % neighbors.size);
    const std::int64_t rows = in_place ? rest : std::min(rest, kLeaf / run.size);
    if (!in_place) {
      x.load(at.in, {run.size, run.in, rows, neighbors.in}, buffer);
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::byte* const values =
          in_place ? x.at(at.in + row * neighbors.in) : buffer + row * run.size * x.value_bytes;
      const std::int64_t out = at.out + row * neighbors.out;
      steps.row(values, stride, run.size, out, 0, acc);
      steps.finish(acc, 1, out, 1);
    }
    begin += rows;
  }
}

// Reduces one result after the other, for results whose elements are adjacent in memory.
void reduce_rows(const ReduceSteps& steps, const ReducePlan& plan, const Source& x) {
  constexpr std::int64_t kGroup = 65536;
  const ReducePlan::Axis& run = plan.reduced.inner();
  const std::int64_t leaves_per_run = (run.size + kLeaf - 1) / kLeaf;
  const std::int64_t leaves = run.size == 0 ? 0 : plan.reduced.numel / run.size * leaves_per_run;
  const std::int64_t group = std::max<std::int64_t>(kGroup / std::clamp<std::int64_t>(run.size, 1, kLeaf), 1);
  const std::int64_t groups = std::max<std::int64_t>((leaves + group - 1) / group, 1);

  // Reduces the leaves of a group of the result at `at` into *acc.
  const auto reduce_group = [&](std::int64_t which, const ReduceOffsets& at, void* acc) {
    Levels<1> levels;
    auto cascade = levels.cascade(steps, 1);
    alignas(64) std::byte buffer[kLeaf * sizeof(std::int64_t)];
    std::byte* const result = cascade.next();
    const std::int64_t end = std::min(leaves, (which + 1) * group);
    for (std::int64_t leaf = which * group; leaf < end; ++leaf) {
      const std::int64_t run_index = leaf / leaves_per_run;
      const std::int64_t start = leaf % leaves_per_run * kLeaf;
      const std::int64_t from = at.in + ReduceOffsets(plan.reduced, run_index, 1).in + start * run.in;
      const std::int64_t n = std::min(kLeaf, run.size - start);
      steps.row(x.values(from, run.in, n, buffer), x.in_place() ? run.in : 1, n, at.out, run_index * run.size + start,
                cascade.next());
      cascade.push();
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
        reduce_short_rows(steps, plan, x, begin, end);
        return;
      }
      for (std::int64_t row = begin; row < end; ++row) {
        const ReduceOffsets at(plan.kept, row);
        alignas(kAccBytes) std::byte acc[kAccBytes];
        reduce_group(0, at, acc);
        steps.finish(acc, 1, at.out, 1);
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
    steps.finish(result, 1, ReduceOffsets(plan.kept, row).out, 1);
  }
}

// Reduces tiles of columns row by row, for results that are adjacent in memory while their elements are not. The
// innermost kept axis has stride 1 in x.
void reduce_columns(const ReduceSteps& steps, const ReducePlan& plan, const Source& x) {
  constexpr std::int64_t kTile = kReduceTile;
  constexpr std::int64_t kLeaf = 32;  // rows
  constexpr std::int64_t kMaxGroups = 64;

  const ReducePlan::Axis columns = plan.kept.inner();
  const std::int64_t rows = plan.reduced.numel;
  const std::int64_t group = std::max<std::int64_t>((rows / kMaxGroups + kLeaf - 1) / kLeaf * kLeaf, 4 * kLeaf);
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
        values[i] = x.values(place.in + ReduceOffsets(plan.reduced, row + i).in, 1, place.width, buffers[i]);
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
                   for (std::int64_t row = first; row < last; row += kLeaf) {
                     reduce_leaf_of(place, row, std::min(last, row + kLeaf), shifts, cascade.next());
                     cascade.push();
                   }
                   if (cascade.empty()) {
                     steps.identity(result, place.width);
                   }
                   cascade.finish();
                   if (groups == 1) {
                     steps.finish(result, place.width, place.out, columns.out);
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
      steps.finish(result, place.width, place.out, columns.out);
    }
  }
}

}  // namespace

void run_reduction(const ReduceSteps& steps, const ReducePlan& plan, const Tensor& x) {
  const Source source(x, steps.value);
  const bool side_by_side = plan.kept.inner().in == 1 && plan.kept.inner().size >= 8;
  if (side_by_side && plan.reduced.inner().in != 1) {
    reduce_columns(steps, plan, source);
  } else {
    reduce_rows(steps, plan, source);
  }
}

}  // namespace mica::kernels::detail
