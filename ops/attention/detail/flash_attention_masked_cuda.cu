// Attention with a mask tensor, on all GPUs. Dropout is a run-time option here, to halve the number of
// kernels.

#include <mica/ops/attention/detail/flash_attention_portable.cuh>

namespace mica::kernels::flash {

void forward_masked(const Work& work) { launch_forward<Variant::masked>(work); }

void backward_masked(const Work& work) { launch_backward<Variant::masked>(work); }

}  // namespace mica::kernels::flash
