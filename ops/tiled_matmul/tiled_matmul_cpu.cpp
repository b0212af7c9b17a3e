#include <mica/ops/elementwise/elementwise_kernels.h>
#include <mica/ops/matmul/matmul_kernels.h>
#include <mica/ops/tiled_matmul/tiled_matmul_kernels.h>

namespace mica::kernels {

void tiled_matmul(Cpu device, const TiledMatmulArgs& args) {
  matmul(device, {.a = readable(args.a), .b = readable(args.b), .bias = {}, .out = args.y});
  if (args.slope != 1) {
    unary(device, functions::LeakyRelu{.slope = args.slope}, args.y, args.y);
  }
}

}  // namespace mica::kernels
