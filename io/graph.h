#pragma once

#include <filesystem>

#include <mica/autograd/graph_picture.h>

namespace mica::io {

/// Draws the graph that `output` was computed by (see autograd::to_dot) into a file: what the ops are, in which
/// modules, of which shapes, and how many bytes each keeps for backward. To be called before backward, which drops
/// them.
///
///     io::write_graph(loss, "graph.svg");
///
/// The end of the name decides: ".dot" writes the text for Graphviz, ".svg" has Graphviz's program `dot` make the
/// picture; of more than some hundred ops that takes long. The file is replaced at once or, after an error, left as it
/// was.
///
/// Throws if the name ends otherwise, if no recorded op made `output`, if the file cannot be written, and, for ".svg",
/// if `dot` is not installed or fails.
void write_graph(const Tensor& output, const std::filesystem::path& path, autograd::GraphPictureOptions options = {});

}  // namespace mica::io
