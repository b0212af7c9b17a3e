#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>

#include <mica/io/safetensors.h>
#include <mica/io/text.h>
#include <mica/nn/generate.h>
#include <mica/nn/gpt.h>

/// A GPT over characters together with its alphabet: what train_transformer stores and generate reads.
struct CharacterModel {
  mica::io::CharTokenizer tokenizer;
  mica::nn::GPT gpt;
};

/// What a model's file says about its configuration: all but the vocabulary, which is the alphabet's.
mica::io::Metadata metadata_of(const mica::nn::GPTConfig& config);

/// Writes a model of `tokenizer`'s characters as one safetensors file, with configuration and alphabet in its metadata.
void save(const mica::nn::GPT& gpt, const mica::io::CharTokenizer& tokenizer, const std::filesystem::path& path);

/// Throws Error if the file is damaged or not one that save wrote.
CharacterModel load_character_model(const std::filesystem::path& path, mica::Device device);

/// Continues `prompt` by `count` characters and hands each to `write` as it comes, as UTF-8. An empty prompt starts a
/// new line.
void write_text(CharacterModel& model, std::string_view prompt, std::int64_t count,
                const mica::nn::SamplingOptions& sampling, const std::function<void(std::string_view)>& write);
