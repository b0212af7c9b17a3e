#include <mica/ops/norm/detail/norm_forward_held_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// Launches the kernel for held rows of x.
void forward_held(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_packs<8>(args, [&]<class N>(const auto& a) { launch_held<N>(a, NoAddends{}, plan); });
}

}  // namespace mica::kernels::norm_cuda
