#include <mica/ops/norm/detail/norm_backward_stream_cuda.cuh>

namespace mica::kernels::norm_cuda {

void backward_streamed_sum(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials) {
  on_norm<4>(args, [&]<bool kCentered, class T, class W>() {
    const auto a = rows_of<T, W>(args, partials);
    args.dx_dropped.defined()
        ? launch_streamed<NormBackwardPolicy<kCentered, GradientSource::y_and_dropped_sum>>(a, plan)
        : launch_streamed<NormBackwardPolicy<kCentered, GradientSource::y_and_sum>>(a, plan);
  });
}

}  // namespace mica::kernels::norm_cuda
