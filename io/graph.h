#pragma once

#include <filesystem>

#include <mica/autograd/graph_picture.h>

namespace mica::io {

/// Draws the graph that computed `output` into a file: ops, modules, shapes, and the bytes each op saves for backward
/// (see autograd::to_dot). Call it before backward, which frees the saved tensors.
///
///     io::write_graph(loss, "graph.svg");
///
/// The file extension selects the format: ".dot" is Graphviz's input; ".svg" runs Graphviz's program `dot`, which is
/// slow for more than a few hundred ops. The file is replaced atomically and unchanged after an error.
///
/// Throws for another extension, if no recorded op produced `output`, if the file cannot be written, and, for ".svg",
/// if `dot` is not installed or fails.
void write_graph(const Tensor& output, const std::filesystem::path& path, autograd::GraphPictureOptions options = {});

}  // namespace mica::io
