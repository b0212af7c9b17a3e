#include <string>
#include <string_view>

#include <mica/core/device.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/train/detail/peak.h>

namespace mica::train::detail {

namespace {

struct Peak {
  std::string_view name;  // a part of the device's name
  double half, tf32, single;
};

// NVIDIA's data sheets, without sparsity; the first match counts. Only devices that the name identifies unambiguously.
constexpr Peak peaks[] = {{"H200", 989e12, 494e12, 67e12},
                          {"H100 80GB HBM3", 989e12, 494e12, 67e12},
                          {"H100 PCIe", 756e12, 378e12, 51e12},
                          {"A100", 312e12, 156e12, 19.5e12}};

}  // namespace

std::optional<double> peak_flops(Device device, DType dtype) {
  if (device.is_cuda()) {
    const std::string name = device_name(device);
    for (const Peak& peak : peaks) {
      if (name.find(peak.name) != std::string::npos) {
        if (dtype == float16 || dtype == bfloat16) {
          return peak.half;
        }
        if (dtype == float32) {
          return float32_matmul_precision() == MatmulPrecision::tf32 ? peak.tf32 : peak.single;
        }
      }
    }
  }
  return std::nullopt;
}

}  // namespace mica::train::detail
