#pragma once

#include <memory>

#include <mica/dist/detail/collectives.h>

namespace mica::dist::detail {

/// Gathers and broadcasts small tensors on the CPU over the control connections, for runs without MPI: what ranks tell
/// each other besides the work of their GPUs. Reductions throw.
std::shared_ptr<Collectives> relayed_collectives(std::shared_ptr<Control> control, std::shared_ptr<Journal> journal);

}  // namespace mica::dist::detail
