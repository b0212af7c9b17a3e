#pragma once

#include <map>
#include <string>

#include <mica/core/tensor.h>

namespace mica {

/// Tensors by name, in the order of their names: what a module or an optimizer is stored as.
using StateDict = std::map<std::string, Tensor>;

}  // namespace mica
