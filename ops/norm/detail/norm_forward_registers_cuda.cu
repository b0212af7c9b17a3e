#include <mica/ops/norm/detail/norm_forward_registers_cuda.cuh>

namespace mica::kernels::norm_cuda {

void forward_in_registers(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_packs<8>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    with_pack<T>(plan.pack > 1, [&]<int V>() { launch_in_registers<V, N>(a, NoAddends{}, plan); });
  });
}

}  // namespace mica::kernels::norm_cuda
