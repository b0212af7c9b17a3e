#include <mica/ops/norm/detail/norm_forward_held_cuda.cuh>

// Held rows of sums.

namespace mica::kernels::norm_cuda {

#define MICA_INSTANTIATE(T, W)                                                                          \
  template void forward_held<Norm<true, Source::sum>>(const Forward<T, W>&, const Addends<T>&,          \
                                                      const NormForwardPlan&);                          \
  template void forward_held<Norm<true, Source::dropped_sum>>(const Forward<T, W>&, const Addends<T>&,  \
                                                              const NormForwardPlan&);                  \
  template void forward_held<Norm<false, Source::sum>>(const Forward<T, W>&, const Addends<T>&,         \
                                                       const NormForwardPlan&);                         \
  template void forward_held<Norm<false, Source::dropped_sum>>(const Forward<T, W>&, const Addends<T>&, \
                                                               const NormForwardPlan&)
MICA_FOR_FLOAT_SUM_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::norm_cuda
