#pragma once

// Which CUDA kernels compute a norm's backward. Plans are functions of the shape, of the dtypes, of whether rows can be
// read in packs of 16 bytes and of whether the chip has clusters, and of nothing else: results depend on no other
// property of the chip, and not on the load.

#include <cstdint>
#include <iterator>

#include <mica/ops/detail/stream_plan.h>

namespace mica::kernels::norm_cuda {

/// Where the gradient of what was normalized comes from: from dy alone, or a sum's own gradient is added; and dropout
/// may leave less of it in a second result.
enum class GradientSource { y, y_and_sum, y_and_dropped_sum };

enum class NormBackwardKernel {
  streamed,  // rows stream through shared memory
  held,      // rows lie in the registers of their threads
  staged,    // and come there through shared memory, in units of 16 bytes in which their elements lie
  looped,    // rows are read twice for dx, and once more for dweight and dbias by the kernel for those alone
  none
};

struct NormBackwardCase {
  std::int64_t rows;
  std::int64_t columns;
  int size;         // of an element of x, in bytes
  int weight_size;  // of a parameter's
  bool centered;    // there is a bias
  bool packs;       // rows can be read in packs of 16 bytes
  bool clusters;    // the chip has compute capability 9.0
  GradientSource source = GradientSource::y;
};

struct NormBackwardPlan {
  NormBackwardKernel kernel = NormBackwardKernel::none;
  std::int64_t partial_rows = 0;  // of dweight and dbias: G
  int pack = 1;                   // columns that are read at once
  bool units = false;             // rows begin anywhere, and are copied in the units of 16 bytes in which they lie
  // Of rows that stream:
  int lanes = 32;  // of a warp that share a row
  int chunks = 1;  // of a row
  int depth = 0;   // chunks in shared memory
  rows::StreamPlan stream = {};
};

NormBackwardPlan plan_norm_backward(const NormBackwardCase& c);

/// How many elements of a row, and of its sums, a thread can hold without spilling.
template <class S>
constexpr int kMostHeld = 64 / static_cast<int>(sizeof(S));

/// How a block of `block` threads holds rows: `threads` share one, with `elements` of it each.
struct HeldLayout {
  int threads;
  int block;
  int elements;

  constexpr int rows() const { return block / threads; }  // at once
  bool operator==(const HeldLayout&) const = default;
};

/// By row length; `size` is that of an element in bytes. packs: of 16 bytes, of which fewer threads read several each
/// of a short row. If there is a bias too, its sums take registers, and a layer norm's sums keep their order.
constexpr HeldLayout held_layout(std::int64_t columns, int size, bool packs, bool centered) {
  const int most = 64 / (size < 4 ? 4 : size);
  if (packs && !centered && columns > 64 && columns <= 256) {
    return {(columns <= 128 ? 128 : 256) / most, 256, most};
  }
  if (packs && centered && columns > 64 && columns <= 128 && size <= 4) {
    return size == 2 ? HeldLayout{16, 256, 8} : HeldLayout{32, 256, 4};
  }
  return columns <= 64           ? HeldLayout{8, 256, 8}
         : columns <= 256        ? HeldLayout{32, 256, 8}
         : columns <= 1024       ? HeldLayout{128, 128, 8}
         : columns <= 256 * most ? HeldLayout{256, 256, most}
                                 : HeldLayout{512, 512, most};
}

/// The same for rows that come through shared memory. A row gets the first layout that is long enough. The threads that
/// share it are those of held_layout(), so that sums are the same.
struct StagedLayout {
  HeldLayout held;
  int blocks;  // that a multiprocessor has room for

  constexpr int columns() const { return held.threads * held.elements; }  // at most
};
inline constexpr StagedLayout kStagedLayouts[] = {{{256, 256, 8}, 3}, {{256, 256, 16}, 2}, {{512, 512, 16}, 1}};
constexpr const StagedLayout& staged_layout(std::int64_t columns) {
  const StagedLayout* layout = kStagedLayouts;
  while (layout->columns() < columns && layout + 1 < std::end(kStagedLayouts)) {
    ++layout;
  }
  return *layout;
}

/// How dweight and dbias alone are computed.
struct ParametersPlan {
  int lanes;           // that share a row
  std::int64_t tiles;  // of columns
  int parts;           // blocks that share a tile
  int cluster;         // of them, that add up their sums themselves

  int partial_rows() const { return parts / cluster; }
};

constexpr int kParametersBlock = 256;  // threads
constexpr int kParametersCluster = 8;  // blocks, at most

/// For lanes that have `width` columns of `size` bytes each and load `unroll` rows at once.
ParametersPlan plan_parameters(std::int64_t rows, std::int64_t columns, int width, int size, int unroll, bool clusters);

}  // namespace mica::kernels::norm_cuda
