#pragma once

// The part of a GGUF file before the tensors' data.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <mica/core/shape.h>
#include <mica/io/file.h>
#include <mica/io/gguf.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::io::detail {

/// Whether a file is a GGUF file, judging by its name.
inline bool is_gguf(const std::filesystem::path& path) { return path.extension() == ".gguf"; }

struct GgufTensor {
  std::string name;
  GgufType type = GgufType::f32;
  Shape shape;
  std::uint64_t begin = 0, bytes = 0;  // in the file
  std::size_t file = 0;                // of a model that is split into several
};

struct GgufHeader {
  GgufMetadata metadata;
  std::vector<GgufTensor> tensors;  // in the order of their data
};

/// Reads and validates everything but the data of one file. Throws an Error that names the file.
GgufHeader read_gguf_header(const InputFile& file);

/// The files of a model and their headers: usually one, several if the model is split.
struct GgufFiles {
  /// Opens the files; `path` is the first one. Throws an Error that names the file and the problem.
  explicit GgufFiles(const std::filesystem::path& path);

  std::vector<std::unique_ptr<InputFile>> files;
  GgufHeader header;  // the first one's metadata, and the tensors of all
};

/// A quantized matrix as it is in the file.
struct GgufMatrix {
  GgufType type = GgufType::q8_0;
  std::int64_t columns = 0;
  Tensor bytes{};  // uint8 (rows, bytes of a row's blocks)
};

/// See load_gguf(). Tensors are named by the files. Quantized matrices go into `matrices` instead, mapped, if it is not
/// null.
StateDict read_gguf_tensors(const GgufFiles& files, const GgufLoadOptions& options,
                            std::map<std::string, GgufMatrix>* matrices = nullptr);

/// The elements of a matrix.
Tensor dequantized(const GgufMatrix& matrix, DType dtype);
/// The matrix as the weight (columns, rows) of a linear layer.
QuantizedWeight packed(const GgufMatrix& matrix);

/// The header as bytes, padded to where the data begin. Sets the tensors' positions; their order is that of the file.
std::string gguf_header_bytes(const GgufMetadata& metadata, std::vector<GgufTensor>& tensors);

/// The size of `elements` elements, a multiple of a block's.
std::uint64_t gguf_bytes(GgufType type, std::uint64_t elements);
bool is_quantized(GgufType type);

/// The data of each tensor begins at a multiple of this, unless the file specifies another alignment.
inline constexpr std::uint64_t kGgufAlignment = 32;
inline constexpr std::size_t kMostGgufAxes = 4;

}  // namespace mica::io::detail
