#pragma once

#include <filesystem>
#include <map>
#include <string>

#include <mica/nn/state_dict.h>

namespace mica::io {

/// Free text by name that a safetensors file carries beside its tensors.
using Metadata = std::map<std::string, std::string>;

/// Writes tensors as a safetensors file (https://huggingface.co/docs/safetensors): 8 bytes with the length of the
/// header, the header in JSON, the elements row-major in little-endian order. Any device, dtype and strides.
///
/// An existing file is replaced only when the new one is wholly on the disk; on an error it stays as it was. Throws
/// Error naming the file.
void save(const std::filesystem::path& path, const StateDict& tensors, const Metadata& metadata = {});

/// Reads all tensors of a safetensors file. Throws Error naming the file and what is wrong with it: everything the
/// header says is checked against the file before memory is asked for.
StateDict load(const std::filesystem::path& path, Device device = Device::cpu());

/// The free text alone. Checks the header as load does.
Metadata load_metadata(const std::filesystem::path& path);

}  // namespace mica::io
