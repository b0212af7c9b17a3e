// Flash attention with a mask tensor, for all GPUs: the kernels of flash_attention_portable.cuh, whose page has the
// drawing, as Variant::masked. Here, dropout is a run-time option, which halves the number of kernels to compile.

#include <mica/ops/attention/detail/flash_attention_portable.cuh>

namespace mica::kernels::flash {

void forward_masked(const Work& work) { launch_forward<Variant::masked>(work); }

void backward_masked(const Work& work) { launch_backward<Variant::masked>(work); }

}  // namespace mica::kernels::flash
