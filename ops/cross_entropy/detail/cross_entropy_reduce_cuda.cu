#include <mica/ops/cross_entropy/detail/cross_entropy_reductions.h>
#include <mica/ops/reduce/detail/reduce_cuda.cuh>

namespace mica::kernels {

void cross_entropy_denominator(Cuda device, const CrossEntropyDenominator& args) { sum_label_weights(device, args); }
void cross_entropy_reduce(Cuda device, const CrossEntropyReduce& args) { reduce_losses(device, args); }

}  // namespace mica::kernels
