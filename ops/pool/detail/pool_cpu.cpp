#include <mica/ops/images/detail/image_loop_cpu.h>
#include <mica/ops/pool/detail/pool_bodies.h>

namespace mica::kernels {

MICA_INSTANTIATE_POOL(Cpu)

}  // namespace mica::kernels
