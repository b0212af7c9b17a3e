#pragma once

#include <optional>

#include <mica/core/device.h>
#include <mica/core/dtype.h>

/// How many floating-point operations a second the device's data sheet promises for dense products of this dtype
/// (float32 in TF32 if `tf32`), where that is known.
std::optional<double> peak_flops(mica::Device device, mica::DType dtype, bool tf32);
