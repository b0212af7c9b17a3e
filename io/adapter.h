#pragma once

// Adapters of linear layers (nn/lora.h) in the folders of Hugging Face's PEFT: adapter_config.json and
// adapter_model.safetensors.

#include <filesystem>
#include <string>

#include <mica/nn/gpt.h>
#include <mica/nn/models/bert.h>
#include <mica/nn/models/llama.h>

namespace mica::io {

/// Writes the adapters of a model as PEFT's from_pretrained() and load_adapter() read them, and creates the folder if
/// needed. `base_model` is the name or folder of the model that they belong to, which PEFT looks for. Throws if the
/// model has no adapters, or adapters of different options.
void save_adapter(nn::GPT& model, const std::filesystem::path& folder, const std::string& base_model = "");
void save_adapter(nn::Llama& model, const std::filesystem::path& folder, const std::string& base_model = "");
void save_adapter(nn::Bert& model, const std::filesystem::path& folder, const std::string& base_model = "");

/// Adds the adapters of a folder to a model that has none, quantized or not, and freezes the model's parameters: see
/// nn::add_lora().
/// Throws an Error that names the file and what is wrong with it, changing nothing: adapters for layers that the model
/// does not have or of another shape, or a configuration that asks for something that mica does not have (DoRA, trained
/// biases, whole modules, ranks that differ between layers).
void load_adapter(nn::GPT& model, const std::filesystem::path& folder);
void load_adapter(nn::Llama& model, const std::filesystem::path& folder);
void load_adapter(nn::Bert& model, const std::filesystem::path& folder);

}  // namespace mica::io
