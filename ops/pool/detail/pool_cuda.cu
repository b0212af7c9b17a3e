#include <mica/ops/images/detail/image_loop.cuh>
#include <mica/ops/pool/detail/pool_bodies.h>

namespace mica::kernels {

MICA_INSTANTIATE_POOL(Cuda)

}  // namespace mica::kernels
