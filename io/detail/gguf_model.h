#pragma once

// Models in GGUF files: conversion between llama.cpp's names of metadata and tensors and those of Hugging Face.

#include <filesystem>
#include <map>
#include <string>

#include <mica/core/dtype.h>
#include <mica/core/state_dict.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/families/table.h>

namespace mica::io::detail {

/// The configuration, from the metadata. Throws an Error that starts with `what`.
PretrainedConfig load_gguf_config(const std::filesystem::path& path, const std::string& what);

struct GgufModel {
  PretrainedConfig config;
  StateDict tensors;                           // with Hugging Face's names; mapped
  std::map<std::string, GgufMatrix> matrices;  // those that are quantized, likewise; never transposed
  DType dtype;  // of the embedding, `dequantized` if it is quantized; in most files, norms are float32 regardless
};

/// Quantized tensors of other than two axes get the dtype `dequantized`.
GgufModel load_gguf_model(const std::filesystem::path& path, DType dequantized, const std::string& what);

/// A model's tensors with Hugging Face's names as a GGUF file has them, and those that belong to the configuration.
StateDict gguf_tensors(const PretrainedConfig& config, const std::string& architecture, const StateDict& tensors);

}  // namespace mica::io::detail
