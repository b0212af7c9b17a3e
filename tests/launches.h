#pragma once

// What a test of kernels expects to have run: a case that is meant for one kernel proves nothing if another took it.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch_record.h>
#include <mica/core/device.h>

namespace mica::testing_support {

/// Whether kernels that need clusters of blocks, as compute capability 9.0 has them, can run here.
inline bool gpu_has_clusters() {
#if MICA_WITH_CUDA
  return cuda_available() && cuda::device_has_clusters();
#else
  return false;
#endif
}

/// Whether kernels that are only compiled for compute capability 9.0 can run here.
inline bool gpu_has_wgmma() {
#if MICA_WITH_CUDA
  return cuda_available() && cuda::device_has_wgmma();
#else
  return false;
#endif
}

/// Expects each of `names` among the launches on `device`. On the CPU there are none to expect.
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
