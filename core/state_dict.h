#pragma once

#include <map>
#include <string>

#include <mica/core/tensor.h>

namespace mica {

/// Tensors by name, sorted: the stored form of a module or an optimizer.
using StateDict = std::map<std::string, Tensor>;

}  // namespace mica
