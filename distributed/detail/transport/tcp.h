#pragma once

#include <memory>

#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/transport/collectives.h>

namespace mica::distributed::detail {

/// Collectives for tensors on the CPU, for runs without MPI. The bytes are sent over the coordinator's connections,
/// through rank 0, which is too slow for gradients. Each rank computes reductions itself, in the order of the ranks.
/// `rank` is this rank's index in the group.
std::shared_ptr<Collectives> tcp_collectives(std::shared_ptr<Coordinator> coordinator,
                                             std::shared_ptr<CollectiveLog> group, int rank);

}  // namespace mica::distributed::detail
