// GCC 12 warns about uninitialized variables in its own AVX-512 intrinsics, and about packets as template arguments.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <mica/core/parallel.h>
#include <mica/ops/gemm/detail/gemm_cpu.h>
#include <mica/ops/recurrent/detail/cells.h>
#include <mica/ops/recurrent/detail/recurrent_kernels.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kGrain = 1024;  // elements of a state for one thread

// Calls f(row, begin, end) in parallel for all elements of (rows, width), in runs within a row.
template <class F>
void for_each_run(std::int64_t rows, std::int64_t width, const F& f) {
  parallel_for(rows * width, kGrain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t row = begin / width, first = row * width;
      const std::int64_t stop = std::min(end, first + width);
      f(row, begin - first, stop - first);
      begin = stop;
    }
  });
}

template <class Cell, class T>
[[gnu::flatten]] void forward_run(const cells::StepForward<T> a, std::int64_t row, std::int64_t begin,
                                  std::int64_t end) {
  const std::int64_t first = row * a.width;
  if (a.is_padding(row)) {
    for (std::int64_t j = begin; j < end; ++j) {
      cells::forward_padding<Cell>(a, first, j);
    }
    return;
  }
  MICA_INDEPENDENT
  for (std::int64_t j = begin; j < end; ++j) {
    cells::forward_element<Cell>(a, first, j);
  }
}

template <class Cell, class T>
[[gnu::flatten]] void backward_run(const cells::StepBackward<T> a, std::int64_t row, std::int64_t begin,
                                   std::int64_t end) {
  const std::int64_t first = row * a.width;
  if (a.is_padding(row)) {
    for (std::int64_t j = begin; j < end; ++j) {
      cells::backward_padding<Cell>(a, first, j);
    }
    return;
  }
  MICA_INDEPENDENT
  for (std::int64_t j = begin; j < end; ++j) {
    cells::backward_element<Cell>(a, first, j);
  }
}

// A packed matrix (K, N) is stored as (column tiles, K · tile) elements, and its shape tells K and N's tiles.
template <class S>
void pack(const Tensor& b, const Tensor& packed) {
  using Size = gemm::Tile<S>;
  const std::int64_t depth = b.size(0), columns = b.size(1);
  const gemm::Matrix<S> matrix{b.data<S>(), b.strides()[0], b.strides()[1]};
  parallel_for(packed.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t column = t * Size::kColumns;
      const int valid = static_cast<int>(std::min<std::int64_t>(Size::kColumns, columns - column));
      const int width = valid <= Size::kWidth ? Size::kWidth : Size::kColumns;
      gemm::pack_columns<S, S>({matrix.data + column * matrix.column, matrix.row, matrix.column}, depth, valid, width,
                               packed.data<S>() + t * Size::kColumns * depth);
    }
  });
}

template <class S>
void multiply(const Tensor& a, const Tensor& packed, const Tensor& bias, const Tensor& out) {
  using Size = gemm::Tile<S>;
  const std::int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  static thread_local gemm::Scratch<S> scratch;
  scratch.start.assign(packed.size(0) * Size::kColumns, S{0});
  if (bias.defined()) {
    std::copy_n(bias.data<S>(), columns, scratch.start.begin());
  }
  gemm::Matrix<S> matrix{a.data<S>(), depth, 1};
  const bool direct = gemm::a_is_direct<S>(matrix);
  const std::int64_t tile = gemm::packed_rows_size<S>(depth);
  if (!direct) {
    const std::int64_t tiles = ceil_div(rows, Size::kRows);
    S* const to = gemm::grown(scratch.a, tiles * tile);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * Size::kRows;
      const int valid = static_cast<int>(std::min<std::int64_t>(Size::kRows, rows - row));
      gemm::pack_rows<S, S>({matrix.data + row * depth, depth, 1}, valid, depth, to + t * tile);
    }
    matrix = gemm::packed_rows(matrix, depth, to);
  }
  gemm::Tiles<S, S>{.rows = rows,
                    .columns = columns,
                    .depth = depth,
                    .a = matrix,
                    .a_step = direct ? Size::kRows * depth : tile,
                    .b = packed.data<S>(),
                    .start = scratch.start.data(),
                    .add = false,
                    .out = out.data<S>(),
                    .leading = columns}
      .run();
}

}  // namespace

void cell_forward(Cpu, const CellForward& args) {
  on_dtype(FloatTypes{}, args.h.dtype(), "recurrent", [&]<class T>() {
    const cells::StepForward<T> a(args);
    cells::with_cell(args.kind, [&]<class Cell>() {
      for_each_run(a.rows, a.width, [&](std::int64_t row, std::int64_t begin, std::int64_t end) {
        forward_run<Cell>(a, row, begin, end);
      });
    });
  });
}

void cell_backward(Cpu, const CellBackward& args) {
  on_dtype(FloatTypes{}, args.dx.dtype(), "recurrent", [&]<class T>() {
    const cells::StepBackward<T> a(args);
    cells::with_cell(args.kind, [&]<class Cell>() {
      for_each_run(a.rows, a.width, [&](std::int64_t row, std::int64_t begin, std::int64_t end) {
        backward_run<Cell>(a, row, begin, end);
      });
    });
  });
}

Tensor pack_for_products(Cpu, const Tensor& b) {
  if ((b.dtype() != float32 && b.dtype() != float64) || b.size(0) > gemm::kDepth || b.numel() == 0) {
    return {};
  }
  const int tile = b.dtype() == float32 ? gemm::Tile<float>::kColumns : gemm::Tile<double>::kColumns;
  const Tensor packed = empty({ceil_div(b.size(1), tile), b.size(0) * tile}, b.dtype());
  b.dtype() == float32 ? pack<float>(b, packed) : pack<double>(b, packed);
  return packed;
}

void multiply_packed(Cpu, const Tensor& a, const Tensor& packed, const Tensor& bias, const Tensor& out) {
  a.dtype() == float32 ? multiply<float>(a, packed, bias, out) : multiply<double>(a, packed, bias, out);
}

}  // namespace mica::kernels
