#pragma once

// Kernel launches that need more than <<<…>>>. Only for .cu files.

#include <cuda_runtime.h>

#include <source_location>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>

namespace mica::cuda {

/// A launch on the current stream: Launch(grid, block).cluster(4).run(kernel, "kernel", arguments…).
class Launch {
 public:
  Launch(dim3 grid, dim3 block, std::size_t shared_bytes = 0) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = current_stream();
    config_.attrs = attributes_;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  /// The number of adjacent blocks, along each axis of the grid, that form a cluster; 1: no cluster.
  Launch& cluster(dim3 blocks) {
    if (blocks.x * blocks.y * blocks.z > 1) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes_[config_.numAttrs++].val.clusterDim = {blocks.x, blocks.y, blocks.z};
    }
    return *this;
  }

  /// It may start before the previous kernel has ended, and waits in wait_for_previous_kernel().
  Launch& dependent() {
    if (device_has_clusters()) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes_[config_.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    return *this;
  }

  template <class... Parameters, class... Arguments>
  void run(void (*kernel)(Parameters...), const char* name, const Arguments&... arguments) {
    check(cudaLaunchKernelEx(&config_, kernel, Parameters(arguments)...), name);
    check_launch(name);
  }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace mica::cuda
