#pragma once

#include <string>

#include <mica/core/check.h>

namespace mica {

/// Where a tensor's elements live: the CPU, or one of the CUDA devices.
struct Device {
  enum class Kind : unsigned char { cpu, cuda };

  Kind kind = Kind::cpu;
  int index = 0;  // which GPU; always 0 on the CPU

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, index}; }

  constexpr bool is_cpu() const { return kind == Kind::cpu; }
  constexpr bool is_cuda() const { return kind == Kind::cuda; }
  friend constexpr bool operator==(Device, Device) = default;
};

/// "cpu" or "cuda:1".
std::string to_string(Device device);

/// The product name, such as "NVIDIA H200"; "cpu" for the CPU.
std::string device_name(Device device);

/// The number of usable CUDA devices; 0 if mica was built without CUDA or there is no driver.
int cuda_device_count();

/// True if there is a usable CUDA device.
inline bool cuda_available() { return cuda_device_count() > 0; }

/// Waits until all work queued on the device is done. Does nothing on the CPU.
void synchronize(Device device);

}  // namespace mica

template <>
struct fmt::formatter<mica::Device> : mica::detail::TextFormatter {
  template <class FormatContext>
  auto format(mica::Device device, FormatContext& context) const {
    return write(mica::to_string(device), context);
  }
};
