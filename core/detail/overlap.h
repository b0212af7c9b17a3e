#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include <mica/core/tensor.h>

namespace mica {

/// False if no element of `a` has memory in common with one of `b`. Compares address ranges, so interleaved views
/// without common elements (two columns of a matrix) give true.
bool may_overlap(const Tensor& a, const Tensor& b);

/// The indices of two tensors that share an element, or nullopt. The same index twice if several elements of one tensor
/// are at the same address (an expanded tensor). Exact: where address ranges intersect, it compares the elements.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const Tensors& tensors);

}  // namespace mica
