#pragma once

// Adapters of linear layers (nn/lora.h) in the format of Hugging Face's PEFT: a folder with adapter_config.json and
// adapter_model.safetensors.

#include <filesystem>
#include <string>

#include <mica/io/families/table.h>

namespace mica::io {

/// Writes the adapters of a model so that PEFT's from_pretrained() and load_adapter() can read them. Creates the folder
/// if needed. `base_model` is the name or folder of the model that they belong to, as PEFT expects it. However the
/// process ends, load_adapter() finds the old adapters or the new ones, whole. PEFT cannot read those of a layer that
/// is a part of one in transformers' model (Phi 3's q_proj).
///
/// Layers may have different ranks and alphas (rank_pattern and alpha_pattern). Other parameters that require a
/// gradient are written, too: biases of the adapted layers or all biases (`bias`), and whole modules (modules_to_save).
///
/// Throws if the model has no adapters, if their dropouts differ or only some are DoRA's, if other sets of biases are
/// trained, or if another thread or process is saving to the folder.
void save_adapter(ModelReference model, const std::filesystem::path& folder, const std::string& base_model = "");

/// Adds the adapters of a folder to a model that has none, quantized or not, and freezes the model's parameters: see
/// nn::add_lora(). Reads ranks and alphas by layer, use_rslora, DoRA, and trained biases and modules, which replace the
/// model's and require a gradient.
///
/// Throws an Error that names the file and the problem, changing nothing, for
/// - adapters of layers that the model does not have, or of another shape;
/// - copies of the model's own tensors, which PEFT saves with an adapter of the head, say, that differ from the model's
///   (by more than rounding if it is quantized);
/// - a trained head or embedding of a model that ties the two, unless the folder has both and they are equal;
/// - patterns other than names with `.`, `\d`, `*` and `+`, or several with different numbers for one layer;
/// - adapters of embeddings (lora_embedding_A), lora_bias, layer_replication, target_parameters,
///   trainable_token_indices, aLoRA, QALoRA, and an initialization that changes the base weights, such as PiSSA's.
void load_adapter(ModelReference model, const std::filesystem::path& folder);

}  // namespace mica::io
