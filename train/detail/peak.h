#pragma once

#include <optional>

#include <mica/core/device.h>
#include <mica/core/dtype.h>

namespace mica::train::detail {

/// The peak floating-point rate per second of the device's data sheet for dense matrix products in this dtype, if
/// known. float32_matmul_precision() selects the one for float32.
std::optional<double> peak_flops(Device device, DType dtype);

}  // namespace mica::train::detail
