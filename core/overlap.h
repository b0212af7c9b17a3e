#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include <mica/core/tensor.h>

namespace mica {

/// False if no element of `a` has memory in common with one of `b`. Compares the ranges of addresses that the two reach
/// over, so views that interleave without touching (two columns of a matrix) give true.
bool may_overlap(const Tensor& a, const Tensor& b);

/// Two of the tensors, by index, that share an element, or one of them twice if two of its own elements have one place
/// (an expanded tensor). Exact: where ranges of addresses intersect, it walks the elements.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const Tensors& tensors);

}  // namespace mica
