#pragma once

#include <string>

#include <mica/core/device.h>

namespace mica {

/// What the maker calls it: "NVIDIA H200"; "cpu" for the CPU.
std::string device_name(Device device);

}  // namespace mica
