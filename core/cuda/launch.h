#pragma once

// Kernel launches with attributes that <<<…>>> cannot express. Only for .cu files.

#include <cuda_runtime.h>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>

namespace mica::cuda {

/// A launch on the current stream: Launch(grid, block).cluster(4).run(kernel, "kernel", arguments…). Allows the kernel
/// as much dynamic shared memory as requested, within the device's limit, and clusters of up to 16 blocks.
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

  Launch& grid(dim3 blocks) {
    config_.gridDim = blocks;
    return *this;
  }

  /// The number of adjacent blocks, along each axis of the grid, that form a cluster; 1: no cluster.
  Launch& cluster(dim3 blocks) {
    cluster_ = blocks;
    if (cluster_size() > 1) {
      add(cudaLaunchAttributeClusterDimension).clusterDim = {blocks.x, blocks.y, blocks.z};
    }
    return *this;
  }

  /// The kernel may start before the previous one has ended; it waits for it in wait_for_previous_kernel().
  Launch& dependent() {
    if (device_has_clusters()) {
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    }
    return *this;
  }

  /// All blocks run at once, or the launch fails.
  Launch& cooperative() {
    add(cudaLaunchAttributeCooperative).cooperative = 1;
    return *this;
  }

  template <class... Parameters, class... Arguments>
  void run(void (*kernel)(Parameters...), const char* name, const Arguments&... arguments) {
    const auto start_with = [&](Parameters... values) {
      void* pointers[] = {&values...};
      start(reinterpret_cast<const void*>(kernel), pointers, name);
    };
    start_with(Parameters(arguments)...);
  }

  /// How many such blocks, or clusters if cluster() was called, can be resident on the device at a time; at least 1.
  /// Does not depend on the grid's size.
  template <class... Parameters>
  int resident(void (*kernel)(Parameters...)) const {
    return resident_groups(reinterpret_cast<const void*>(kernel));
  }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    attributes_[config_.numAttrs].id = id;
    return attributes_[config_.numAttrs++].val;
  }

  unsigned cluster_size() const { return cluster_.x * cluster_.y * cluster_.z; }

  void prepare(const void* kernel) const;
  void start(const void* kernel, void** arguments, const char* name) const;
  int resident_groups(const void* kernel) const;

  cudaLaunchAttribute attributes_[3] = {};
  cudaLaunchConfig_t config_ = {};
  dim3 cluster_ = 1;
};

}  // namespace mica::cuda
