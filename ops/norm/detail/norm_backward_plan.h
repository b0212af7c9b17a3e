#pragma once

// Chooses the CUDA kernels of a norm's backward. A plan depends only on the shape, the dtypes, the alignment of the
// matrices, and whether the GPU has clusters. So results do not depend on other properties of the GPU, or on its load.

#include <cstdint>

#include <mica/ops/detail/stream_plan.h>

namespace mica::kernels::norm_cuda {

/// Where the gradient of the normalized matrix comes from: from y alone, or from y and from the sum itself, whose
/// gradient (dsum) is added. With y_and_dropped_sum, there is a second result, to which dropout is applied.
enum class GradientSource { y, y_and_sum, y_and_dropped_sum };

enum class NormBackwardKernel {
  streamed,  // rows stream through shared memory
  held,      // rows are held in registers
  looped,    // rows are read twice for dx, and a third time by the kernel for dweight and dbias
  none
};

struct NormBackwardCase {
  std::int64_t rows;
  std::int64_t columns;
  int size;         // of an element of x, in bytes
  int weight_size;  // of an element of weight and bias, in bytes
  bool centered;    // a layer norm, which may have a bias
  bool packs;       // rows can be read in packs of 16 bytes
  bool alike;       // the same row begins at the same place in a sector of 32 bytes in all matrices
  bool clusters;    // the GPU has compute capability 9.0
  GradientSource source = GradientSource::y;
};

struct NormBackwardPlan {
  NormBackwardKernel kernel = NormBackwardKernel::none;
  std::int64_t partial_rows = 0;  // G: rows of partial sums of dweight and dbias
  std::int64_t teams = 0;         // that share the rows, if these are streamed
  int pack = 1;                   // columns per load
  // For streamed rows:
  int lanes = 32;  // lanes of a warp that share a row
  int chunks = 1;  // chunks that a row is cut into
  int depth = 0;   // chunks that the shared memory holds
  rows::StreamPlan stream = {};
};

NormBackwardPlan plan_norm_backward(const NormBackwardCase& c);

/// The number of elements of a row, and of sums over rows, that a thread can hold without spilling registers.
template <class S>
constexpr int kMostHeld = 64 / static_cast<int>(sizeof(S));

/// How a block of `block` threads holds rows in registers: `threads` threads share a row, and each holds `elements` of
/// its elements.
struct HeldLayout {
  int threads;
  int block;
  int elements;

  constexpr int rows() const { return block / threads; }  // rows that the block holds at once
  bool operator==(const HeldLayout&) const = default;
};

/// The layout for a row of `columns` elements of `size` bytes. `packs`: rows are read in packs of 16 bytes; then fewer
/// threads share a short row, and each reads several packs. A layer norm (`centered`) also has sums for its bias, which
/// take registers, so its threads hold fewer elements; the order of a row's sums is the same as with 32 threads per
/// row.
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

/// How dweight and dbias are computed without dx.
struct ParametersPlan {
  int lanes;           // lanes that share a row
  std::int64_t tiles;  // tiles that the columns are divided into
  int parts;           // blocks that share a tile
  int cluster;         // blocks of these that form a cluster, which adds up their sums

  int partial_rows() const { return parts / cluster; }
};

constexpr int kParametersBlock = 256;  // threads per block
constexpr int kParametersCluster = 8;  // the most blocks of a cluster

/// For lanes that have `width` columns of `size` bytes each, and load `unroll` rows at once.
ParametersPlan plan_parameters(std::int64_t rows, std::int64_t columns, int width, int size, int unroll, bool clusters);

}  // namespace mica::kernels::norm_cuda
