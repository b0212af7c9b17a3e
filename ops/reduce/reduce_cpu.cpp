#include <mica/ops/reduce/reduce_cpu.h>
#include <mica/ops/reduce/reduce_kernels.h>
#include <mica/ops/reduce/reduce_ops.h>

namespace mica::kernels {

void sum(Cpu device, const Sum& args) {
  on_dtype(AllTypes{}, args.x.dtype(), "sum", [&]<class T>() {
    using Op = SumOp<T>;
    reduce<T>(device, Op{static_cast<typename Op::Acc>(args.divisor)}, args.x, nullptr, args.y);
  });
}

}  // namespace mica::kernels
