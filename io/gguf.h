#pragma once

// GGUF, the files of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include <mica/core/state_dict.h>
#include <mica/io/gguf_types.h>

namespace mica::io {

struct GgufSaveOptions {
  /// The type in which floating tensors with two or more axes are stored; by default, they keep their dtypes. Of the
  /// quantized types, q8_0, q4_0, q6_k and q4_k are written. Tensors whose rows are not a multiple of 32 elements keep
  /// their dtype, and q6_k and q4_k become q8_0 if rows are not a multiple of 256 elements.
  std::optional<GgufType> matrices{};
  /// Like `matrices`, for floating tensors with at most one axis; not a quantized type. llama.cpp expects f32 for norms
  /// and biases.
  std::optional<GgufType> vectors{};
  /// Instead of `matrices`, by the tensor's name in the file: {{"token_embd.weight", GgufType::q6_k}}.
  std::map<std::string, GgufType> types{};
};

/// Writes tensors as a GGUF file of version 3: float32, float16, bfloat16, float64, int32 and int64, on any device and
/// with any strides. As ggml requires, each has at least one element, at most four axes and a name of at most 63 bytes.
/// Blocks of q8_0 and q4_0 have the same bits as ggml's own; those of q6_k and q4_k mean what ggml reads, with scales
/// found by another search. "general.quantization_version" is added if there are any.
///
/// An existing file is replaced only after the new one is completely on disk. Throws an Error that names the file,
/// including for elements to be quantized that are not finite or too large for the scale of their block.
void save_gguf(const std::filesystem::path& path, const StateDict& tensors, const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {});

struct GgufLoadOptions {
  Device device = Device::cpu();
  DType dequantized = float32;  ///< the dtype to which quantized tensors are converted
  /// On the CPU, the other tensors refer to the mapped file, which is read when they are first used: see load_mapped()
  /// in safetensors.h for what this means for the file.
  bool mapped = false;
};

/// Reads all tensors of a GGUF file of version 2 or 3, under the file's names and with its dtypes. Quantized tensors
/// have the values, to the bit, that llama.cpp's package `gguf` computes. Throws an Error that names the file and the
/// problem, such as a type that GgufType lacks. The whole header is validated against the file before memory is
/// allocated for tensors.
///
/// A model may be split into files "name-00001-of-00003.gguf" and so on: pass the first one.
StateDict load_gguf(const std::filesystem::path& path, const GgufLoadOptions& options = {});

/// Reads the metadata only. Validates as load_gguf does, but not the other files of a split model.
GgufMetadata load_gguf_metadata(const std::filesystem::path& path);

/// The type of each tensor in a file, by name. Reads and validates the header only.
std::map<std::string, GgufType> load_gguf_types(const std::filesystem::path& path);

}  // namespace mica::io
