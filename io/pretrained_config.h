#pragma once

// The JSON files of a model saved by Hugging Face's transformers: conversion between config.json and the configurations
// of nn's models, and the index of shards.

#include <map>
#include <string>
#include <variant>

#include <mica/io/json.h>
#include <mica/nn/models/bert.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/models/llama.h>

namespace mica::io {

/// A model that load_pretrained() can build.
using PretrainedConfig = std::variant<nn::GPTConfig, nn::LlamaConfig, nn::BertConfig>;

/// The configuration in a config.json with the model_type gpt2, llama, mistral, qwen2, qwen3, smollm3 or bert. Entries
/// that mica does not know are ignored. Throws an Error that starts with `what` and names the entry, if an entry asks
/// for a computation that mica does not support, is missing, of the wrong type or out of range.
PretrainedConfig pretrained_config(const JsonValue& json, const std::string& what);

/// The entries of config.json for a configuration. Throws if transformers has no model of this kind, such as a GPT-2
/// without biases.
JsonValue::Object config_entries(const PretrainedConfig& config);

/// The number of elements of the model's parameters; tied parameters count once.
std::int64_t parameter_count(const PretrainedConfig& config);

/// From the contents of a model.safetensors.index.json: the name of the file that holds each tensor. Throws an Error
/// that starts with `what`.
std::map<std::string, std::string> weight_map(const JsonValue& index, const std::string& what);

}  // namespace mica::io
