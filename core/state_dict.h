#pragma once

#include <map>
#include <string>

#include <mica/core/tensor.h>

namespace mica {

/// Tensors by name, sorted: the stored form of a module or an optimizer.
using StateDict = std::map<std::string, Tensor>;

/// Row-major copies of all tensors, in new memory: they do not follow the model that `state` came from. A tensor that
/// has several names is copied once, and undefined ones stay undefined.
///
///     StateDict best = clone(model.state_dict());
StateDict clone(const StateDict& state);

}  // namespace mica
