// Attention with a mask tensor, on all chips. Dropout is decided at run time here, so that there are not twice as many
// kernels.

#include <mica/ops/attention/flash_attention_portable.cuh>

namespace mica::kernels::flash {

void forward_masked(const Work& work) { launch_forward<Variant::masked>(work); }

void backward_masked(const Work& work) { launch_backward<Variant::masked>(work); }

}  // namespace mica::kernels::flash
