#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward on CUDA: plans a norm, and calls the launcher that the plan names.

namespace mica::kernels {

Tensor norm_cuda::at_packs(const Tensor& parameter) {
  if (!parameter.defined() || reinterpret_cast<std::uintptr_t>(parameter.raw_data()) % 16 == 0) {
    return parameter;
  }
  const Tensor copy = empty(parameter.shape(), parameter.dtype(), parameter.device());
  copy_into(copy, parameter);
  return copy;
}

using namespace norm_cuda;

namespace {

NormForwardPlan plan_of(const NormForward& args) {
  return norm_forward_plan({.rows = args.rows,
                            .columns = args.columns,
                            .x = args.x.dtype(),
                            .weight = parameter_type(args),
                            .parameters = args.weight.defined() && (args.bias.defined() || !args.centered),
                            .centered = args.centered,
                            .adds = args.residual.defined(),
                            .aligned = fit_packs(args.columns, args.x.dtype(), args.x, args.weight, args.bias, args.y,
                                                 args.residual, args.x_bias, args.sum),
                            .clusters = cuda::device_has_clusters(),
                            .multiprocessors = cuda::multiprocessor_count()});
}

}  // namespace

void norm_forward(Cuda, const NormForward& args) {
  const NormForwardPlan plan = plan_of(args);
  switch (plan.kernel) {
    case NormForwardPlan::Kernel::in_registers: return forward_in_registers(args, plan);
    case NormForwardPlan::Kernel::short_rows: return forward_short(args, plan);
    case NormForwardPlan::Kernel::looped: return forward_looped(args);
  }
}

bool add_norm_forward(Cuda, const NormForward& args) {
  const NormForwardPlan plan = plan_of(args);
  const bool has_kernel =
      plan.kernel == NormForwardPlan::Kernel::in_registers && size_of(args.x.dtype()) <= sizeof(float);
  if (has_kernel) {
    forward_sum_in_registers(args, plan);
  }
  return has_kernel;
}

}  // namespace mica::kernels
