#include <mica/core/detail/ceil_div.h>
#include <mica/ops/gemm/detail/kernel_sm90.cuh>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_cuda.cuh>

// tiled_matmul() on compute capability 9.0: the kernel of ops/gemm with an activation as its epilogue, and the
// choice of the tile's size.

namespace mica::kernels::tiles {

namespace {

/// y = leaky_relu(a · b), with a slope of 1 for none.
template <class T>
struct LeakyRelu {
  using Element = T;
  static constexpr int kBuffers = 2;
  using Memory = gemm::Nothing;
  CUtensorMap y;
  int columns;
  float slope;

  template <class Tile, int kSums>
  __device__ void end(gemm::TileBuffers<kBuffers>& buffers, const Tile& tile, const float (&sums)[1][kSums],
                      gemm::Nothing) const {
    const auto value = [&](const float* s, int) { return float2{leaky(s[0], slope), leaky(s[1], slope)}; };
    buffers.template write<T, kSums / (gemm::kChunk / 2)>(&y, tile.row, tile.column, columns, sums[0],
                                                          [&](int) { return value; });
  }
};

/// Calls f.operator()<P>() with the fastest plan for the sizes: wide tiles, unless they leave many multiprocessors
/// idle. All plans sum an element in the same order.
template <class F>
void on_plan(std::int64_t rows, std::int64_t columns, const F& f) {
  const int blocks = cuda::multiprocessor_count();
  // The measured time of one tile, times the number of tiles per block.
  const auto cost = [&]<class P>(P, double tile) {
    return tile * static_cast<double>(ceil_div(gemm::sizes_of<P>(rows, columns, 1).order.size(), blocks / P::kCluster));
  };
  using Wide = gemm::TilePlan<256, 4, 2>;
  using Middle = gemm::TilePlan<128, 6, 1>;
  using Narrow = gemm::TilePlan<64, 8, 1>;
  const double wide = cost(Wide{}, 1), middle = cost(Middle{}, 0.52), narrow = cost(Narrow{}, 0.42);
  if (wide <= std::min(middle, narrow)) {
    f.template operator()<Wide>();
  } else if (middle <= narrow) {
    f.template operator()<Middle>();
  } else {
    f.template operator()<Narrow>();
  }
}

}  // namespace

bool fits_sm90(const Tensor& x) { return gemm::fits_tensor_map(x); }

void multiply_sm90(const TiledMatmulArgs& args) {
  const std::int64_t m = args.y.size(0);
  const std::int64_t n = args.y.size(1);
  on_dtype(Types<Float16, BFloat16>{}, args.y.dtype(), "tiled_matmul", [&]<class T>() {
    on_lines(gemm::layout_of(args.a), gemm::layout_of(args.b), [&]<Lines kA, Lines kB>() {
      on_plan(m, n, [&]<class P>() {
        gemm::launch<P, gemm::Schedule::split_rows>(
            "tiled_matmul_kernel", m, n, args.a.size(1), gemm::MatrixOperands<P, kA, kB>(args.a, args.b),
            LeakyRelu<T>{.y = gemm::map_of(args.y, gemm::kHalfRows),
                         .columns = static_cast<int>(n),
                         .slope = static_cast<float>(slope_of(args.activation))});
      });
    });
  });
}

}  // namespace mica::kernels::tiles
