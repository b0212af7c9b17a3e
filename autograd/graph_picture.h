#pragma once

#include <cstddef>
#include <string>

#include <mica/core/tensor.h>

namespace mica::autograd {

struct GraphPictureOptions {
  std::size_t max_nodes =
      2000;  ///< limit on the ops and leaves drawn, nearest to the output first; one box counts the rest
};

/// The graph that computed `output`, in Graphviz's DOT language: what backward would traverse, drawn in the order of
/// forward, from the leaves at the top to `output`. Deterministic: the same graph gives the same text.
///
/// A box is an op: its name, the shape and dtype of its outputs, and the bytes it saves for backward. A storage is
/// counted once, at the first op that saved it, and in full, since a saved view keeps the whole storage alive.
/// Parameters and other leaves that require a gradient are not counted: they exist anyway. After a backward without
/// retain_graph nothing is saved any more. Leaves are filled boxes with their parameter names. Frames are the modules
/// that open a Scope, with their path and the bytes saved by the ops inside. Edges are labelled if an op has several
/// outputs.
///
/// Throws if `output` is undefined or no recorded op made it.
std::string to_dot(const Tensor& output, GraphPictureOptions options = {});

}  // namespace mica::autograd
