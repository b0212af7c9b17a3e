#pragma once

#include <string>

#include <mica/core/device.h>

namespace mica {

/// The product name, such as "NVIDIA H200"; "cpu" for the CPU.
std::string device_name(Device device);

}  // namespace mica
