#include <mica/ops/scan/detail/scan_bodies.h>
#include <mica/ops/scan/detail/scan_rows_cpu.h>

namespace mica::kernels {

template void cumsum(Cpu, const Cumsum&);
template void cumprod(Cpu, const Cumprod&);
template void logcumsumexp(Cpu, const Logcumsumexp&);
template void recurrence(Cpu, const Recurrence&);
template void cumextreme(Cpu, const Cumextreme&);

}  // namespace mica::kernels
