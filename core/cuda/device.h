#pragma once

// The available GPUs, and which one is current. Needs no CUDA header.

namespace mica::cuda {

/// The number of devices that this program can use; 0 without a driver.
int device_count();

/// Makes `device` this thread's current device and returns the previous one. Throws if there is no such device.
int exchange_device(int device);

/// Waits for all work on the current device.
void synchronize();

/// Whether the current device supports clusters and dependent launches (compute capability 9.0).
bool device_has_clusters();

/// Whether the current device supports core/cuda/detail/wgmma.cuh, and files named *_sm90.cu were compiled for it.
bool device_has_wgmma();

/// The number of multiprocessors of the current device.
int multiprocessor_count();

}  // namespace mica::cuda
