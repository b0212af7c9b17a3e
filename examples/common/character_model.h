#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>

#include <mica/io/text.h>
#include <mica/nn/generate.h>
#include <mica/nn/gpt.h>

/// A GPT over characters together with its alphabet: what train_transformer stores and generate reads.
struct CharacterModel {
  mica::io::CharTokenizer tokenizer;
  mica::nn::GPT gpt;
};

/// The configuration of all these models: no biases.
mica::nn::GPTConfig character_config(const mica::io::CharTokenizer& tokenizer, std::int64_t context,
                                     std::int64_t layers, std::int64_t heads, std::int64_t width, double dropout = 0);

/// Writes the model as one safetensors file, with configuration and alphabet in its metadata.
void save(const CharacterModel& model, const std::filesystem::path& path);

/// Throws Error if the file is damaged or not one that save wrote.
CharacterModel load_character_model(const std::filesystem::path& path, mica::Device device);

/// Continues `prompt` by `count` characters and hands each to `write` as it comes, as UTF-8. An empty prompt starts a
/// new line.
void write_text(CharacterModel& model, std::string_view prompt, std::int64_t count,
                const mica::nn::SamplingOptions& sampling, const std::function<void(std::string_view)>& write);
