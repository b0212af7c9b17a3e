#include <mica/ops/images/detail/image_loop_cpu.h>
#include <mica/ops/sample/detail/sample_bodies.h>

namespace mica::kernels {

MICA_INSTANTIATE_SAMPLE(Cpu)

}  // namespace mica::kernels
