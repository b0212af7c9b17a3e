#pragma once

// Language models in GGUF files: llama.cpp's names of metadata and tensors, from and to those of Hugging Face.

#include <filesystem>
#include <optional>
#include <string>

#include <mica/core/dtype.h>
#include <mica/io/gguf.h>
#include <mica/io/pretrained_config.h>
#include <mica/nn/state_dict.h>

namespace mica::io::detail {

/// The configuration by the metadata. Throws an Error that starts with `what`.
PretrainedConfig load_gguf_config(const std::filesystem::path& path, const std::string& what);

struct GgufModel {
  PretrainedConfig config;
  StateDict tensors;  // as in a folder of Hugging Face; mapped where they are stored in their dtypes
  DType dtype;        // of the embedding: norms are float32 in most files
};

/// Tensors that are stored as q8_0 or q4_0 get the dtype `dequantized`.
GgufModel load_gguf_model(const std::filesystem::path& path, DType dequantized, const std::string& what);

struct GgufParameter {
  std::string name;
  Tensor tensor;
};
/// A tensor of a Hugging Face folder as it is in a GGUF file.
GgufParameter gguf_parameter(const nn::LlamaConfig& config, const std::string& name, const Tensor& tensor);
GgufParameter gguf_parameter(const nn::GPTConfig& config, const std::string& name, const Tensor& tensor);

/// What llama.cpp needs of the configuration, without the tokenizer. Throws if it has no such model.
GgufMetadata gguf_metadata(const nn::LlamaConfig& config);
GgufMetadata gguf_metadata(const nn::GPTConfig& config);

/// Llama 3's scaling as a tensor; nothing for the others.
std::optional<GgufParameter> gguf_frequency_divisors(const nn::LlamaConfig& config);

}  // namespace mica::io::detail
