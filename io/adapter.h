#pragma once

// Adapters of linear layers (nn/lora.h) in the format of Hugging Face's PEFT: a folder with adapter_config.json and
// adapter_model.safetensors.

#include <filesystem>
#include <string>

#include <mica/io/families/table.h>

namespace mica::io {

/// Writes the adapters of a model so that PEFT's from_pretrained() and load_adapter() can read them. Creates the folder
/// if needed. `base_model` is the name or folder of the model that they belong to, as PEFT expects it. However the
/// process ends, load_adapter() finds the old adapters or the new ones, whole. Throws if the model has no adapters, or
/// adapters with different options, or if another thread or process is saving to the folder.
void save_adapter(ModelReference model, const std::filesystem::path& folder, const std::string& base_model = "");

/// Adds the adapters of a folder to a model that has none, quantized or not, and freezes the model's parameters: see
/// nn::add_lora().
/// Throws an Error that names the file and the problem, changing nothing, for adapters of layers that the model does
/// not have, adapters of another shape, an adapter of the head that was trained on another weight (PEFT saves that
/// weight, too), and configurations that mica does not support (DoRA, trained biases, whole
/// modules, ranks that differ between layers, an initialization that changes the base weights, such as PiSSA's).
void load_adapter(ModelReference model, const std::filesystem::path& folder);

}  // namespace mica::io
