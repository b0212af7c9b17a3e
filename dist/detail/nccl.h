#pragma once

#include <functional>
#include <memory>

#include <mica/dist/detail/collectives.h>

namespace mica::dist::detail {

/// Collectives among `size` ranks, for tensors on one GPU of each. The communicator is made at the first collective, on
/// the GPU of its tensor; `broadcast` then passes the bytes of a tensor on the CPU from rank 0 to all.
std::shared_ptr<Collectives> nccl_collectives(int rank, int size, std::function<void(const Tensor& bytes)> broadcast);

}  // namespace mica::dist::detail
