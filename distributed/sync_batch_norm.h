#pragma once

#include <mica/distributed/group.h>
#include <mica/nn/module.h>

namespace mica::distributed {

/// Makes every nn::BatchNorm1d, 2d and 3d in the module, in training, normalize by the statistics of the batches of all
/// ranks of the group together; each rank's part may have another size. The ranks must call these layers, forward and
/// backward, in the same order. Gradients of weights and biases are those of the rank's part: DataParallel averages
/// them. Second derivatives are an error. Does nothing for a group of one.
///
/// Call it when the module is in its place: a layer that is moved out of the module keeps the group.
void synchronize_batch_norms(nn::Module& module, const Group& group);

}  // namespace mica::distributed
