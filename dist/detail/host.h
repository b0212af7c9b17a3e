#pragma once

#include <memory>

#include <mica/dist/detail/collectives.h>
#include <mica/dist/detail/control.h>

namespace mica::dist::detail {

/// Collectives for tensors on the CPU, of runs without MPI: the bytes travel over the control connections, through rank
/// 0. For what ranks tell each other, and for checkpoints; gradients would be slow. Each rank reduces by itself, in the
/// order of the ranks. `rank` is this rank's place in the group.
std::shared_ptr<Collectives> host_collectives(std::shared_ptr<Control> control, std::shared_ptr<Journal> group,
                                              int rank);

}  // namespace mica::dist::detail
