// What core/cuda/ defines, for a build without CUDA.

#if !MICA_WITH_CUDA

#include <mica/core/cuda_graph.h>
#include <mica/core/device.h>
#include <mica/core/dispatch.h>

namespace mica {

namespace {

void expect_cpu(Device device) {
  check(device.is_cpu(), "mica was built without CUDA, so there is no device {}", device);
}

}  // namespace

int cuda_device_count() { return 0; }

std::string device_name(Device device) {
  expect_cpu(device);
  return "cpu";
}

void synchronize(Device device) { expect_cpu(device); }

DeviceGuard::DeviceGuard(Device device) { expect_cpu(device); }
DeviceGuard::~DeviceGuard() = default;

namespace cuda {

struct Graph::State {};

Graph capture(const std::function<void()>&, Device device) {
  fail("capture: mica was built without CUDA, so there is no device {}", device);
}

void Graph::replay() const { fail("replay: the graph is empty; cuda::capture makes one"); }

std::size_t Graph::node_count() const { return 0; }

std::size_t Graph::reserved_bytes() const { return 0; }

}  // namespace cuda

}  // namespace mica

#endif
