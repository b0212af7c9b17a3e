#include <mica/ops/norm/detail/norm_forward_held_cuda.cuh>

namespace mica::kernels::norm_cuda {

void forward_held(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_packs<8>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    with_pack<T>(plan.pack > 1, [&]<int V>() { launch_held<V, N>(a, NoAddends{}, plan); });
  });
}

}  // namespace mica::kernels::norm_cuda
