#pragma once

#include <functional>
#include <memory>

#include <mica/dist/detail/collectives.h>

namespace mica::dist::detail {

/// Collectives among `size` ranks, for tensors on one GPU of each. The communicator is made at the first collective, on
/// the GPU of its tensor; `broadcast` then passes the bytes of a tensor on the CPU from rank 0 to all.
///
/// When `control` says that a rank has failed, the communicator is aborted: NCCL's kernels end, with wrong results, and
/// wait() throws. Errors that NCCL finds while a collective runs are reported to it. It may be null for a group of one.
std::shared_ptr<Collectives> nccl_collectives(int rank, int size, std::shared_ptr<Control> control,
                                              std::function<void(const Tensor& bytes)> broadcast);

}  // namespace mica::dist::detail
