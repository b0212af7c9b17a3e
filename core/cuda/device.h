#pragma once

// Which GPUs there are and which one is current. Needs no CUDA header.

namespace mica::cuda {

/// Devices that this program can use; 0 if there is no driver.
int device_count();

/// Makes `device` this thread's current device and returns the one that was. Throws if there is no such device.
int exchange_device(int device);

/// Waits for all work on the current device.
void synchronize();

/// Whether blocks of the current device can form clusters, and a kernel can start before the one before it has ended.
bool device_has_clusters();

/// Whether the current device has what core/cuda/wgmma.cuh is for, and files named *_sm90.cu were compiled for it.
bool device_has_wgmma();

/// Multiprocessors of the current device.
int multiprocessor_count();

}  // namespace mica::cuda
