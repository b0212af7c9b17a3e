#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/softmax/detail/softmax_kernels.h>
#include <mica/ops/softmax/detail/softmax_rows_cuda.cuh>

namespace mica::kernels {

namespace {

using softmax_rows::Kind;

/// x → y, or y, dy → dx, along an axis.
template <template <class, Kind> class Direction, Kind kKind, class... Inputs>
void run(const Tensor& to, int axis, const Inputs&... from) {
  constexpr int kColumns = softmax_rows::kColumns;
  const AxisSplit split(to.shape(), axis);
  on_dtype(FloatTypes{}, to.dtype(), "softmax", [&]<class T>() {
    const Direction<T, kKind> direction;
    const softmax_rows::Matrices<T, sizeof...(Inputs)> m{{from.template data<T>()...}, to.data<T>()};
    if (split.inner == 1) {
      return softmax_rows::run(m, split.outer, split.n, direction);
    }
    const std::int64_t blocks = split.outer * ((split.inner + kColumns - 1) / kColumns);
    softmax_rows::softmax_columns<<<rows::grid_of(blocks), dim3(kColumns, softmax_rows::kColumnThreads), 0,
                                    cuda::current_stream()>>>(m, split.outer, split.n, split.inner, direction);
    cuda::check_launch(direction.kBackward ? "softmax_backward_columns" : "softmax_columns");
  });
}

}  // namespace

using softmax_rows::Backward;
using softmax_rows::Forward;

void softmax(Cuda, const SoftmaxForward& args) { run<Forward, Kind::softmax>(args.y, args.axis, args.x); }
void log_softmax(Cuda, const SoftmaxForward& args) { run<Forward, Kind::log_softmax>(args.y, args.axis, args.x); }
void softmax_backward(Cuda, const SoftmaxBackward& args) {
  run<Backward, Kind::softmax>(args.dx, args.axis, args.y, args.dy);
}
void log_softmax_backward(Cuda, const SoftmaxBackward& args) {
  run<Backward, Kind::log_softmax>(args.dx, args.axis, args.y, args.dy);
}

}  // namespace mica::kernels
