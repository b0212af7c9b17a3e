#pragma once

// Checks which kernels a test launched, since a case that is meant for one kernel proves nothing if another one ran.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/cuda/device.h>
#include <mica/core/device.h>

namespace mica::testing_support {

/// Whether this machine runs kernels with clusters (compute capability 9.0).
inline bool gpu_has_clusters() {
#if MICA_WITH_CUDA
  return cuda_available() && cuda::device_has_clusters();
#else
  return false;
#endif
}

/// Whether this machine runs kernels compiled for compute capability 9.0 only.
inline bool gpu_has_wgmma() {
#if MICA_WITH_CUDA
  return cuda_available() && cuda::device_has_wgmma();
#else
  return false;
#endif
}

/// The number of multiprocessors of the GPU; 0 without CUDA.
inline int gpu_multiprocessors() {
#if MICA_WITH_CUDA
  return cuda_available() ? cuda::multiprocessor_count() : 0;
#else
  return 0;
#endif
}

/// Expects that each of `names` was launched on `device`. On the CPU, checks nothing.
inline void expect_launched(const cuda::LaunchRecord& record, Device device, std::initializer_list<const char*> names,
                            const std::string& what = "") {
  for (const char* name : names) {
    if (device.is_cuda() && !record.has(name)) {
      ADD_FAILURE() << what << ": " << name
                    << " did not run; these did: " << fmt::format("{}", fmt::join(record.unique(), ", "));
    }
  }
}

}  // namespace mica::testing_support
