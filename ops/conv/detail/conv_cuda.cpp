#include <mica/ops/conv/detail/conv_kernels.h>

namespace mica::kernels {

void convolve(Cuda device, const Convolution& args) {
#if MICA_WITH_CUDNN
  if (cudnn_convolve(device, args)) {
    return;
  }
#endif
  composed_convolve(args);
}

}  // namespace mica::kernels
