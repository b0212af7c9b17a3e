// The first line of the input is a tokenizer.json, or describes the vocabulary, merges and options of one; the rest is
// text for the tokenizer. Decoding the tokens must give the text, after invalid UTF-8 was repaired and the text was
// normalized as the tokenizer does.

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/byte_tokens.h"
#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/json.h>
#include <mica/io/tokenizer.h>

using namespace mica;
using io::detail::NormalForm;

namespace {

// A tokenizer.json whose vocabulary has all bytes, and merges that the input chooses.
std::string description(std::string_view recipe) {
  using io::JsonValue;
  JsonValue::Object vocabulary;
  std::vector<std::string> tokens = fuzz::byte_tokens();
  for (std::size_t byte = 0; byte < tokens.size(); ++byte) {
    vocabulary[tokens[byte]] = {static_cast<std::int64_t>(byte)};
  }
  JsonValue::Array merges;
  const auto byte_at = [&](std::size_t i) { return static_cast<unsigned char>(recipe[i]); };
  for (std::size_t i = 1; i + 1 < recipe.size(); i += 2) {
    const std::string left = tokens[(byte_at(i) * 7) % tokens.size()], right = tokens[byte_at(i + 1) % tokens.size()];
    const std::string both = left + right;
    if (both.size() < 64 && vocabulary.emplace(both, JsonValue{static_cast<std::int64_t>(tokens.size())}).second) {
      merges.push_back({JsonValue::Array{{left}, {right}}});
      tokens.push_back(both);
    }
  }
  const int options = recipe.empty() ? 0 : byte_at(0);
  JsonValue::Object file;
  file["model"] = {JsonValue::Object{
      {"vocab", {std::move(vocabulary)}}, {"merges", {std::move(merges)}}, {"ignore_merges", {(options & 1) != 0}}}};
  if ((options & 2) != 0) {
    file["normalizer"] = {JsonValue::Object{{"type", {std::string("NFC")}}}};
  }
  const auto added = [&](const char* content, std::int64_t id) {
    return JsonValue{JsonValue::Object{{"id", {static_cast<std::int64_t>(tokens.size()) + id}},
                                       {"content", {std::string(content)}},
                                       {"lstrip", {(options & 4) != 0}},
                                       {"rstrip", {(options & 8) != 0}},
                                       {"single_word", {(options & 16) != 0}},
                                       {"normalized", {(options & 32) != 0}},
                                       {"special", {false}}}};
  };
  file["added_tokens"] = {JsonValue::Array{added("<|a|>", 0), added("<|a|>b", 1), added("e\u0301", 2)}};
  JsonValue::Array steps;
  if ((options & 64) != 0) {
    steps.push_back(
        {JsonValue::Object{{"type", {std::string("Digits")}}, {"individual_digits", {(options & 1) != 0}}}});
  }
  steps.push_back({JsonValue::Object{{"type", {std::string("ByteLevel")}}, {"add_prefix_space", {false}}}});
  file["pre_tokenizer"] = {
      JsonValue::Object{{"type", {std::string("Sequence")}}, {"pretokenizers", {std::move(steps)}}}};
  return io::to_json({std::move(file)});
}

void use(const io::Tokenizer& tokenizer, std::string_view text) {
  const std::vector<std::int64_t> tokens = tokenizer.encode(text);
  fuzz::expect(tokenizer.encode(text) == tokens);  // the second call uses the cache of words
  const std::string decoded = tokenizer.decode(tokens, {.skip_special_tokens = false});
  fuzz::expect(io::detail::valid_utf8_length(decoded) == decoded.size());
  io::StreamDecoder stream(tokenizer, {.skip_special_tokens = false});
  std::string streamed;
  for (const std::int64_t token : tokens) {
    const std::string part = stream.push(token);
    fuzz::expect(io::detail::valid_utf8_length(part) == part.size());
    streamed += part;
  }
  fuzz::expect(streamed + stream.finish() == decoded);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(input.find('\n'), input.size());
  const std::string_view recipe = input.substr(0, end);
  const std::string_view text = input.substr(std::min(end + 1, input.size()));

  // Normalizing a second time changes nothing.
  const std::string repaired = io::detail::repaired_utf8(text);
  for (const auto form : {NormalForm::c, NormalForm::d, NormalForm::kc, NormalForm::kd}) {
    const std::string normalized = io::detail::normal_form(repaired, form);
    fuzz::expect(io::detail::normal_form(normalized, form) == normalized);
    fuzz::expect(io::detail::may_change(repaired, form) || normalized == repaired);
  }

  const std::string own = description(recipe);
  const auto tokenizer = io::Tokenizer::parse(own, "", "own");
  use(tokenizer, text);
  const bool strips = !recipe.empty() && (recipe[0] & (4 | 8)) != 0;
  const bool normalizes = !recipe.empty() && (recipe[0] & (2 | 32)) != 0;
  if (!strips && !normalizes) {
    fuzz::expect(tokenizer.decode(tokenizer.encode(text)) == repaired);
  }
  try {
    use(io::Tokenizer::parse(recipe, text, "input"), text);
  } catch (const Error&) {
  }
  try {
    use(io::Tokenizer::parse(recipe, "", "input"), text);
  } catch (const Error&) {
  }
  return 0;
}
