#pragma once

// Language models in GGUF files: conversion between llama.cpp's names of metadata and tensors and those of Hugging
// Face.

#include <filesystem>
#include <optional>
#include <string>

#include <mica/core/dtype.h>
#include <mica/io/gguf.h>
#include <mica/io/pretrained_config.h>
#include <mica/nn/state_dict.h>

namespace mica::io::detail {

/// The configuration, from the metadata. Throws an Error that starts with `what`.
PretrainedConfig load_gguf_config(const std::filesystem::path& path, const std::string& what);

struct GgufModel {
  PretrainedConfig config;
  StateDict tensors;  // with Hugging Face's names; mapped unless they are quantized
  DType dtype;        // of the embedding; in most files, norms are float32 regardless
};

/// Tensors that are stored as q8_0 or q4_0 get the dtype `dequantized`.
GgufModel load_gguf_model(const std::filesystem::path& path, DType dequantized, const std::string& what);

struct GgufParameter {
  std::string name;
  Tensor tensor;
};
/// Converts the name and layout of a Hugging Face tensor to those of GGUF.
GgufParameter gguf_parameter(const nn::LlamaConfig& config, const std::string& name, const Tensor& tensor);
GgufParameter gguf_parameter(const nn::GPTConfig& config, const std::string& name, const Tensor& tensor);

/// The configuration as llama.cpp's metadata, without the tokenizer. Throws if llama.cpp does not support such a model.
GgufMetadata gguf_metadata(const nn::LlamaConfig& config);
GgufMetadata gguf_metadata(const nn::GPTConfig& config);

/// Llama 3's rotary scaling as a tensor of divisors; nullopt for other scalings.
std::optional<GgufParameter> gguf_frequency_divisors(const nn::LlamaConfig& config);

}  // namespace mica::io::detail
