#pragma once

// The JSON files of a model saved by Hugging Face's transformers: conversion between config.json and the configurations
// of nn's models, and the index of shards.

#include <cstdint>
#include <map>
#include <string>

#include <mica/io/families/table.h>
#include <mica/io/json.h>

namespace mica::io {

/// The configuration in a config.json with the model_type of one of the families. Entries that mica does not know are
/// ignored. Throws an Error that starts with `what` and names the entry, if an entry asks for a computation that mica
/// does not support, is missing, of the wrong type or out of range.
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
