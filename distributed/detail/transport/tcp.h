#pragma once

#include <memory>

#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/transport/collectives.h>

namespace mica::distributed::detail {

/// Collectives for tensors on the CPU, for runs without MPI: the bytes are sent over the control connections, through
/// rank 0. Meant for small tensors and checkpoints; too slow for gradients. Each rank computes reductions itself, in
/// the order of the ranks. `rank` is this rank's index in the group.
std::shared_ptr<Collectives> host_collectives(std::shared_ptr<Control> control, std::shared_ptr<Journal> group,
                                              int rank);

}  // namespace mica::distributed::detail
