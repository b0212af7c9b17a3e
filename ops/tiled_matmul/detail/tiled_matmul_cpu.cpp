#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_kernels.h>

namespace mica::kernels {

void tiled_matmul(Cpu device, const TiledMatmulArgs& args) {
  matmul(device,
         {.a = readable(args.a), .b = readable(args.b), .bias = {}, .out = args.y, .activation = args.activation});
}

}  // namespace mica::kernels
