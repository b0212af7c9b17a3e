#include <mica/ops/norm/detail/norm_backward_stream_cuda.cuh>

namespace mica::kernels::norm_cuda {

void backward_streamed_sum(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials) {
  on_norm<4>(args, [&]<bool kCentered, class T, class W>() {
    launch_streamed<NormBackwardPolicy<kCentered, /*kAdds=*/true>>(rows_of<T, W>(args, partials), plan);
  });
}

}  // namespace mica::kernels::norm_cuda
