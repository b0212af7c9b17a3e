#pragma once

#include <functional>
#include <memory>

#include <mica/distributed/detail/transport/collectives.h>

namespace mica::distributed::detail {

class Coordinator;

/// Collectives among `size` ranks, for tensors on one GPU per rank. The communicator is created at the first
/// collective, on the GPU of its tensor; `broadcast` must copy a byte tensor on the CPU from rank 0 to all.
///
/// If a rank fails, the communicator is aborted: NCCL's kernels end with wrong results, and wait() throws. Errors that
/// NCCL detects while a collective runs are reported to `coordinator`, which may be null for a group of one.
///
/// While a CUDA graph is captured, collectives become a part of it. Transfer::replayed() is for each replay.
std::shared_ptr<Collectives> nccl_collectives(int rank, int size, std::shared_ptr<Coordinator> coordinator,
                                              std::function<void(const Tensor& bytes)> broadcast);

}  // namespace mica::distributed::detail
