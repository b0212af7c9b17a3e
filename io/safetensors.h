#pragma once

#include <filesystem>
#include <map>
#include <string>

#include <mica/core/state_dict.h>

namespace mica::io {

/// The metadata of a safetensors file: strings by name.
using Metadata = std::map<std::string, std::string>;

/// Writes tensors as a safetensors file (https://huggingface.co/docs/safetensors): 8 bytes with the length of the
/// header, the header in JSON, the elements in row-major and little-endian order. Any device, dtype and strides.
///
/// An existing file is replaced only after the new one is completely on disk; after an error it is unchanged. Throws an
/// Error that names the file.
void save(const std::filesystem::path& path, const StateDict& tensors, const Metadata& metadata = {});

/// Reads all tensors of a safetensors file. Throws an Error that names the file and the problem. The whole header is
/// validated against the file before memory is allocated.
StateDict load(const std::filesystem::path& path, Device device = Device::cpu());

/// Like load(), on the CPU, but without reading the data: the tensors refer to the file mapped into memory, and
/// elements are read when they are first used. Writing to a tensor changes a private copy of the page written to, never
/// the file. While one of the tensors is alive, the file must not be truncated or written (save(), which replaces the
/// file, is fine). A tensor whose data is not aligned for its dtype is copied. Validates as load() does.
StateDict load_mapped(const std::filesystem::path& path);

/// Reads the metadata only. Validates the header as load() does.
Metadata load_metadata(const std::filesystem::path& path);

}  // namespace mica::io
