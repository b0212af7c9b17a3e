#pragma once

#include <cstddef>
#include <string>

#include <mica/core/tensor.h>

namespace mica::autograd {

struct GraphPictureOptions {
  std::size_t max_nodes = 2000;  ///< ops and leaves to draw, those nearest to the output; one box counts the others
};

/// The graph that `output` was computed by, in Graphviz's DOT language: what backward would go through, in the order of
/// forward, from the leaves down to `output`. The same graph gives the same text.
///
/// A box is an op: its name, the shape and dtype of its outputs, and how many bytes it keeps for backward. A storage is
/// counted once, at the first op that saved it, and with all of its bytes, as a saved view keeps them all; parameters
/// and other leaves that require a gradient are not counted, as they are there anyway. After a backward without
/// retain_graph nothing is kept. Leaves are filled boxes, with the names that modules gave them. Frames are modules, as
/// far as they open a Scope, with their paths and what the ops inside of them keep. An arrow is labelled where an op
/// has several outputs.
///
/// Throws if `output` is undefined or no recorded op made it.
std::string to_dot(const Tensor& output, GraphPictureOptions options = {});

}  // namespace mica::autograd
