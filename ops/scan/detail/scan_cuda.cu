#include <mica/ops/scan/detail/scan_bodies.h>
#include <mica/ops/scan/detail/scan_rows_cuda.cuh>

namespace mica::kernels {

template void cumsum(Cuda, const Cumsum&);
template void cumprod(Cuda, const Cumprod&);
template void logcumsumexp(Cuda, const Logcumsumexp&);
template void recurrence(Cuda, const Recurrence&);
template void cumextreme(Cuda, const Cumextreme&);

}  // namespace mica::kernels
