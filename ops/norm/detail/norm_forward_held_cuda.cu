#include <mica/ops/norm/detail/norm_forward_held_cuda.cuh>

// Held rows of x.

namespace mica::kernels::norm_cuda {

#define MICA_INSTANTIATE(T, W)                                                                            \
  template void forward_held<Norm<true>>(const Forward<T, W>&, const NoAddends&, const NormForwardPlan&); \
  template void forward_held<Norm<false>>(const Forward<T, W>&, const NoAddends&, const NormForwardPlan&)
MICA_FOR_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::norm_cuda
