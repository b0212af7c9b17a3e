#include <climits>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/ceil_div.h>
#include <mica/core/detail/wrap.h>
#include <mica/ops/matmul/detail/integer_matmul_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kSide = 16;

// A block computes tiles of kSide × kSide elements, one per thread, from tiles of a and b in shared memory. Tiles of
// rows are along x, those of columns along y, and matrices along z; a block takes every gridDim.y-th and gridDim.z-th.
template <class T>
__global__ void __launch_bounds__(kSide* kSide)
    integer_matmul_kernel(const T* a, const T* b, T* out, std::int64_t batch, std::int64_t m, std::int64_t n,
                          std::int64_t k) {
  __shared__ T left[kSide][kSide + 1];
  __shared__ T right[kSide][kSide + 1];
  const int x = static_cast<int>(threadIdx.x);
  const int y = static_cast<int>(threadIdx.y);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kSide + y;
  for (std::int64_t matrix = blockIdx.z; matrix < batch; matrix += gridDim.z) {
    for (std::int64_t tile = blockIdx.y; tile * kSide < n; tile += gridDim.y) {
      const std::int64_t column = tile * kSide + x;
      T sum = 0;
      for (std::int64_t first = 0; first < k; first += kSide) {
        left[y][x] = row < m && first + x < k ? a[(matrix * m + row) * k + first + x] : T{0};
        right[y][x] = column < n && first + y < k ? b[(matrix * k + first + y) * n + column] : T{0};
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          sum = wrapping_add(sum, wrapping_mul(left[y][i], right[i][x]));
        }
        __syncthreads();
      }
      if (row < m && column < n) {
        out[(matrix * m + row) * n + column] = sum;
      }
    }
  }
}

}  // namespace

void integer_matmul(Cuda, const IntegerMatmul& args) {
  const std::int64_t batch = args.out.shape()[0], m = args.out.shape()[1], n = args.out.shape()[2];
  if (args.out.numel() == 0) {
    return;
  }
  const std::int64_t rows = ceil_div(m, std::int64_t{kSide});
  check(rows <= INT_MAX, "matmul: expected at most {} rows of integers on CUDA, got {}", std::int64_t{INT_MAX} * kSide,
        m);
  const dim3 grid(static_cast<unsigned>(rows),
                  static_cast<unsigned>(std::min<std::int64_t>(ceil_div(n, std::int64_t{kSide}), 65535)),
                  static_cast<unsigned>(std::min<std::int64_t>(batch, 65535)));
  on_dtype(IntegerTypes{}, args.out.dtype(), "matmul", [&]<class T>() {
    integer_matmul_kernel<T><<<grid, dim3(kSide, kSide), 0, cuda::current_stream()>>>(
        args.a.data<T>(), args.b.data<T>(), args.out.data<T>(), batch, m, n, args.a.shape()[2]);
    cuda::check_launch("integer_matmul_kernel");
  });
}

}  // namespace mica::kernels
