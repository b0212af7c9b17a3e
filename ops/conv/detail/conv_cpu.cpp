#include <mica/ops/conv/detail/conv_kernels.h>

namespace mica::kernels {

void convolve(Cpu, const Convolution& args) { composed_convolve(args); }

}  // namespace mica::kernels
