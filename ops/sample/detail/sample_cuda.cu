#include <mica/ops/images/detail/image_loop.cuh>
#include <mica/ops/sample/detail/sample_bodies.h>

namespace mica::kernels {

MICA_INSTANTIATE_SAMPLE(Cuda)

}  // namespace mica::kernels
