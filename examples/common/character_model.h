#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

#include <mica/infer/generate.h>
#include <mica/io/safetensors.h>
#include <mica/io/text.h>
#include <mica/nn/models/gpt.h>

/// A character-level GPT with its alphabet, as stored by train_transformer and read by generate.
struct CharacterModel {
  mica::io::CharTokenizer tokenizer;
  mica::nn::GPT gpt;
};

/// Writes a model as one safetensors file, with its configuration in the metadata. A model of `tokenizer`'s characters
/// also stores their alphabet, so that generate can write text.
void save(const mica::nn::GPT& gpt, const std::optional<mica::io::CharTokenizer>& tokenizer,
          const std::filesystem::path& path);

/// Throws Error if the file is damaged or was not written by save.
CharacterModel load_character_model(const std::filesystem::path& path, mica::Device device);

/// Continues `prompt` by options.count characters and passes each, as UTF-8, to `write` when it is sampled. An empty
/// prompt starts a new line. `options` must not have on_token.
void write_text(CharacterModel& model, std::string_view prompt, mica::infer::GenerateOptions options,
                const std::function<void(std::string_view)>& write);
