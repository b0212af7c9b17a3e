#pragma once

#include <optional>

#include <mica/core/device.h>
#include <mica/core/dtype.h>

/// The peak floating-point rate per second of the device's data sheet for dense matrix products in this dtype (TF32 for
/// float32 if `tf32`), if known.
std::optional<double> peak_flops(mica::Device device, mica::DType dtype, bool tf32);
