#include <mica/ops/reduce/detail/reduce_cuda.cuh>
#include <mica/ops/reduce/detail/reduce_kernels.h>
#include <mica/ops/reduce/detail/reductions.h>

namespace mica::kernels {

void extreme(Cuda device, const Extreme& args) {
  on_dtype(NumericTypes{}, args.x.dtype(), "max", [&]<class T>() {
    if (args.largest) {
      reduce<T>(device, ExtremeOp<T, true>{}, args.x, args.values);
    } else {
      reduce<T>(device, ExtremeOp<T, false>{}, args.x, args.values);
    }
    if (args.indices.defined()) {
      reduce<T>(device, FindOp<T>{}, args.x, args.indices, args.values.data<T>());
    }
  });
}

}  // namespace mica::kernels
