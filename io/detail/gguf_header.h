#pragma once

// The part of a GGUF file before the tensors' data.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <mica/core/shape.h>
#include <mica/io/file.h>
#include <mica/io/gguf.h>

namespace mica::io::detail {

/// Whether a file is a GGUF file, judging by its name.
inline bool is_gguf(const std::filesystem::path& path) { return path.extension() == ".gguf"; }

struct GgufTensor {
  std::string name;
  GgufType type = GgufType::f32;
  Shape shape;
  std::uint64_t begin = 0, bytes = 0;  // in the file
};

struct GgufHeader {
  GgufMetadata metadata;
  std::vector<GgufTensor> tensors;  // in the order of their data
};

/// Reads and validates everything but the data. Throws an Error that names the file.
GgufHeader read_gguf_header(const InputFile& file);

/// The tensors of a file with this header: see load_gguf().
StateDict read_gguf_tensors(const InputFile& file, const GgufHeader& header, const GgufLoadOptions& options);

/// The header as bytes, padded to where the data begin. Sets the tensors' positions; their order is that of the file.
std::string gguf_header_bytes(const GgufMetadata& metadata, std::vector<GgufTensor>& tensors);

/// The size of `elements` elements, a multiple of a block's.
std::uint64_t gguf_bytes(GgufType type, std::uint64_t elements);
bool is_quantized(GgufType type);

/// The data of each tensor begins at a multiple of this, unless the file specifies another alignment.
inline constexpr std::uint64_t kGgufAlignment = 32;
inline constexpr std::size_t kMostGgufAxes = 4;

}  // namespace mica::io::detail
