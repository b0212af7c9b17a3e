#pragma once

#include <string>
#include <vector>

#include <mica/io/detail/unicode.h>
#include <mica/io/json.h>
#include <mica/io/tokenizer.h>

namespace mica::fuzz {

/// Tokens 0 to 255 of a vocabulary, one for each byte, spelled as in GPT-2.
inline std::vector<std::string> byte_tokens() {
  std::vector<std::string> tokens;
  for (int byte = 0, moved = 256; byte < 256; ++byte) {
    const bool is_visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    std::string text;
    io::detail::append_utf8(text, static_cast<char32_t>(is_visible ? byte : moved++));
    tokens.push_back(text);
  }
  return tokens;
}

/// A tokenizer of bytes with special tokens 256, 257, …, and with the chat template if that is not empty.
inline io::Tokenizer byte_tokenizer(const std::vector<std::string>& special, const std::string& chat_template) {
  using io::JsonValue;
  JsonValue::Object vocabulary;
  std::int64_t count = 0;
  for (const std::string& token : byte_tokens()) {
    vocabulary[token] = {count++};
  }
  JsonValue::Array added;
  for (const std::string& token : special) {
    added.push_back({JsonValue::Object{{"id", {count++}}, {"content", {token}}, {"special", {true}}}});
  }
  JsonValue::Object file;
  file["model"] = {JsonValue::Object{{"vocab", {std::move(vocabulary)}}, {"merges", {JsonValue::Array{}}}}};
  file["added_tokens"] = {std::move(added)};
  file["pre_tokenizer"] = {JsonValue::Object{{"type", {std::string("ByteLevel")}}, {"add_prefix_space", {false}}}};
  const JsonValue::Object config{{"chat_template", {chat_template}}, {"eos_token", {special.back()}}};
  return io::Tokenizer::parse(io::to_json({std::move(file)}), io::to_json({config}), "own");
}

}  // namespace mica::fuzz
