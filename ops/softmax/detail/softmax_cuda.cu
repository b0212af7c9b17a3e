#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/softmax/detail/softmax_kernels.h>
#include <mica/ops/softmax/detail/softmax_rows_cuda.cuh>

namespace mica::kernels {

namespace {

using softmax_rows::Kind;

template <class Direction>
void run(const typename Direction::Inputs& m, const AxisSplit& split, const Direction& direction) {
  if (split.inner == 1) {
    return softmax_rows::run(m, split.outer, split.n, direction);
  }
  constexpr int kColumns = softmax_rows::kColumns;
  const std::int64_t blocks = split.outer * ((split.inner + kColumns - 1) / kColumns);
  softmax_rows::softmax_columns<<<rows::grid_of(blocks), dim3(kColumns, softmax_rows::kColumnThreads), 0,
                                  cuda::current_stream()>>>(m, split.outer, split.n, split.inner, direction);
  cuda::check_launch(Direction::kBackward ? "softmax_backward_columns" : "softmax_columns");
}

template <Kind kKind>
void forward(const SoftmaxForward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "softmax", [&]<class T>() {
    run({{args.x.data<T>()}, args.y.data<T>()}, AxisSplit(args.x.shape(), args.axis),
        softmax_rows::Forward<T, kKind>{});
  });
}

template <Kind kKind>
void backward(const SoftmaxBackward& args) {
  on_dtype(FloatTypes{}, args.y.dtype(), "softmax", [&]<class T>() {
    run({{args.y.data<T>(), args.dy.data<T>()}, args.dx.data<T>()}, AxisSplit(args.y.shape(), args.axis),
        softmax_rows::Backward<T, kKind>{});
  });
}

}  // namespace

void softmax(Cuda, const SoftmaxForward& args) { forward<Kind::softmax>(args); }
void log_softmax(Cuda, const SoftmaxForward& args) { forward<Kind::log_softmax>(args); }
void softmax_backward(Cuda, const SoftmaxBackward& args) { backward<Kind::softmax>(args); }
void log_softmax_backward(Cuda, const SoftmaxBackward& args) { backward<Kind::log_softmax>(args); }

}  // namespace mica::kernels
