#include <mica/core/device.h>

namespace mica {

std::string to_string(Device device) { return device.is_cpu() ? "cpu" : fmt::format("cuda:{}", device.index); }

}  // namespace mica
