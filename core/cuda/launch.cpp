#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include <mica/core/cuda/launch.h>

namespace mica::cuda {

namespace {

constexpr unsigned kPortableCluster = 8;  // blocks; larger clusters need permission

/// Allows launches of a kernel with this much dynamic shared memory. The default limit is 48 KiB, static memory
/// included. Never lowers the limit, since another thread may be about to launch the kernel with more.
void allow_shared_memory(const void* kernel, std::size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::size_t> allowed;  // by kernel and device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  std::size_t& most = allowed[{kernel, device}];
  if (bytes > most) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "cudaFuncSetAttribute");
    most = bytes;
  }
}

}  // namespace

void Launch::prepare(const void* kernel) const {
  if (config_.dynamicSmemBytes > 0) {
    allow_shared_memory(kernel, config_.dynamicSmemBytes);
  }
  if (cluster_size() > kPortableCluster) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  }
}

void Launch::start(const void* kernel, void** arguments, const char* name) const {
  prepare(kernel);
  check(cudaLaunchKernelExC(&config_, kernel, arguments), name);
  check_launch(name);
}

int Launch::resident_groups(const void* kernel) const {
  prepare(kernel);
  int groups = 0;
  if (cluster_size() == 1) {
    const dim3 block = config_.blockDim;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&groups, kernel, static_cast<int>(block.x * block.y * block.z),
                                                        config_.dynamicSmemBytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    groups *= multiprocessor_count();
  } else {
    cudaLaunchConfig_t config = config_;
    config.gridDim = cluster_;
    check(cudaOccupancyMaxActiveClusters(&groups, kernel, &config), "cudaOccupancyMaxActiveClusters");
  }
  return std::max(groups, 1);
}

}  // namespace mica::cuda
