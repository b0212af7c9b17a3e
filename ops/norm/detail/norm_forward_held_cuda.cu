#include <mica/ops/norm/detail/norm_forward_held_cuda.cuh>

namespace mica::kernels::norm_cuda {

void forward_held(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_packs<8>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    plan.pack > 1 ? launch_held<16 / sizeof(T), N>(a, NoAddends{}, plan) : launch_held<1, N>(a, NoAddends{}, plan);
  });
}

}  // namespace mica::kernels::norm_cuda
