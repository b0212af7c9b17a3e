#include <mica/ops/norm/detail/norm_forward_registers_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// Launches the kernel that computes a sum and keeps its rows in registers.
void forward_sum_in_registers(const NormForward& args, const NormForwardPlan& plan) {
  on_norm<4>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    const Addends<T> addends{.residual = args.residual.data<T>(),
                             .x_bias = args.x_bias.data_or_null<T>(),
                             .sum = args.sum.data<T>(),
                             .key = args.dropout.key,
                             .threshold = args.dropout.threshold,
                             .scale = static_cast<float>(args.dropout.scale())};
    launch_in_registers<16 / sizeof(T), Norm<N::kCentered, /*kAdds=*/true>>(a, addends, plan);
  });
}

}  // namespace mica::kernels::norm_cuda
