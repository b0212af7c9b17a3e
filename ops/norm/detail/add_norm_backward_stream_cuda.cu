#include <mica/ops/norm/detail/norm_backward_stream_cuda.cuh>

namespace mica::kernels::norm_cuda {

#define MICA_INSTANTIATE(T, W)                                                                                     \
  template void backward_streamed<NormBackwardPolicy<true, GradientSource::y_and_sum>>(const BackwardRows<T, W>&,  \
                                                                                       const NormBackwardPlan&);   \
  template void backward_streamed<NormBackwardPolicy<true, GradientSource::y_and_dropped_sum>>(                    \
      const BackwardRows<T, W>&, const NormBackwardPlan&);                                                         \
  template void backward_streamed<NormBackwardPolicy<false, GradientSource::y_and_sum>>(const BackwardRows<T, W>&, \
                                                                                        const NormBackwardPlan&);  \
  template void backward_streamed<NormBackwardPolicy<false, GradientSource::y_and_dropped_sum>>(                   \
      const BackwardRows<T, W>&, const NormBackwardPlan&)
MICA_FOR_FLOAT_SUM_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::norm_cuda
