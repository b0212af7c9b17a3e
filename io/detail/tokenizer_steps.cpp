#include <array>
#include <memory>
#include <utility>

#include <mica/io/detail/tokenizer_steps.h>

namespace mica::io::detail {

namespace {

std::string from_base64(const JsonReader& read, std::string_view text) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<int, 256> values{};
  values.fill(-1);
  for (std::size_t i = 0; i < digits.size(); ++i) {
    values[static_cast<unsigned char>(digits[i])] = static_cast<int>(i);
  }
  while (text.ends_with('=')) {
    text.remove_suffix(1);
  }
  std::string bytes;
  unsigned bits = 0;
  int count = 0;
  for (const char c : text) {
    const int value = values[static_cast<unsigned char>(c)];
    read.require(value >= 0, "\"precompiled_charsmap\" is not Base64");
    bits = bits << 6 | static_cast<unsigned>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count & 0xFF));
    }
  }
  return bytes;
}

// {"String": …} or {"Regex": …}
Searched searched_of(const JsonReader& read, const JsonValue& json) {
  const JsonValue* const pattern = JsonReader::member(json, "pattern");
  read.require(pattern != nullptr, "expected a \"pattern\"");
  return JsonReader::member(*pattern, "Regex") != nullptr
             ? Searched::expression(read.text(*pattern, "Regex"), read.what())
             : Searched::text(read.text(*pattern, "String"));
}

SplitBehavior behavior_of(const JsonReader& read, const JsonValue& json) {
  return read.choice<SplitBehavior>(
      json, "behavior", std::array{"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"});
}

PreTokenizerStep metaspace_of(const JsonReader& read, const JsonValue& json) {
  using Prepend = PreTokenizerStep::Prepend;
  PreTokenizerStep step{.kind = PreTokenizerStep::Kind::metaspace, .text = read.text(json, "replacement")};
  read.require(!step.text.empty(), "the replacement of Metaspace is empty");
  // Files of older versions have "add_prefix_space" instead.
  step.prepend = JsonReader::member(json, "prepend_scheme") != nullptr
                     ? read.choice<Prepend>(json, "prepend_scheme", std::array{"never", "first", "always"})
                 : read.flag(json, "add_prefix_space", true) ? Prepend::always
                                                             : Prepend::never;
  step.splits = read.flag(json, "split", true);
  return step;
}

PreTokenizerStep split_of(const JsonReader& read, const JsonValue& json) {
  PreTokenizerStep step{.kind = PreTokenizerStep::Kind::search,
                        .behavior = behavior_of(read, json),
                        .is_inverted = read.flag(json, "invert", false)};
  const JsonValue* const pattern = JsonReader::member(json, "pattern");
  const JsonValue* const expression = pattern == nullptr ? nullptr : JsonReader::member(*pattern, "Regex");
  const auto* const source = expression == nullptr ? nullptr : expression->as<std::string>();
  for (const Pattern known : {Pattern::gpt2, Pattern::llama3, Pattern::qwen}) {
    if (source != nullptr && *source == regular_expression(known)) {
      // It matches all of a text.
      const bool keeps =
          step.behavior != SplitBehavior::contiguous && (step.behavior != SplitBehavior::removed || step.is_inverted);
      if (keeps) {
        return {.kind = PreTokenizerStep::Kind::pattern, .pattern = known};
      }
    }
  }
  step.searched = searched_of(read, json);
  return step;
}

}  // namespace

Normalizer normalizer_of(const JsonReader& read, const JsonValue& json) {
  using Kind = NormalizerStep::Kind;
  Normalizer steps;
  read.for_each_part(json, "normalizers", [&](const JsonValue& part, const std::string& type) {
    constexpr std::array<std::pair<const char*, NormalForm>, 4> forms{
        {{"NFC", NormalForm::c}, {"NFD", NormalForm::d}, {"NFKC", NormalForm::kc}, {"NFKD", NormalForm::kd}}};
    for (const auto& [name, form] : forms) {
      if (type == name) {
        steps.push_back({.kind = Kind::form, .form = form});
        return;
      }
    }
    if (type == "Lowercase") {
      steps.push_back({.kind = Kind::lower_case});
    } else if (type == "StripAccents") {
      steps.push_back({.kind = Kind::strip_accents});
    } else if (type == "Nmt") {
      steps.push_back({.kind = Kind::nmt});
    } else if (type == "Strip") {
      steps.push_back({.kind = Kind::strip,
                       .left = read.flag(part, "strip_left", true),
                       .right = read.flag(part, "strip_right", true)});
    } else if (type == "Replace") {
      steps.push_back({.kind = Kind::replace, .searched = searched_of(read, part), .text = read.text(part, "content")});
    } else if (type == "Prepend") {
      steps.push_back({.kind = Kind::prepend, .text = read.text(part, "prepend")});
    } else if (type == "Precompiled") {
      const std::string table = JsonReader::member(part, "precompiled_charsmap") == nullptr
                                    ? ""
                                    : from_base64(read, read.text(part, "precompiled_charsmap"));
      if (!table.empty()) {
        steps.push_back({.kind = Kind::map, .map = std::make_shared<const CharacterMap>(table, read.what())});
      }
    } else if (type == "BertNormalizer") {
      const bool lower_case = read.flag(part, "lowercase", true);
      steps.push_back({.kind = Kind::bert,
                       .bert = {.clean_text = read.flag(part, "clean_text", true),
                                .separate_chinese = read.flag(part, "handle_chinese_chars", true),
                                .strip_accents = read.flag(part, "strip_accents", lower_case),
                                .lower_case = lower_case}});
    } else {
      fail("{}: the normalizer {} is not supported", read.what(), in_quotes(type));
    }
  });
  return steps;
}

PreTokenizerSteps pre_tokenizer_of(const JsonReader& read, const JsonValue& json) {
  using Kind = PreTokenizerStep::Kind;
  PreTokenizerSteps result;
  PreTokenizer& steps = result.steps;
  read.for_each_part(json, "pretokenizers", [&](const JsonValue& part, const std::string& type) {
    if (std::exchange(result.is_byte_level, false)) {
      steps.push_back({.kind = Kind::byte_characters});
    }
    if (type == "ByteLevel") {
      result.is_byte_level = true;
      if (read.flag(part, "add_prefix_space", true)) {
        steps.push_back({.kind = Kind::leading_space});
      }
      if (read.flag(part, "use_regex", true)) {
        steps.push_back({.kind = Kind::pattern, .pattern = Pattern::gpt2});
      }
    } else if (type == "Split") {
      steps.push_back(split_of(read, part));
    } else if (type == "CharDelimiterSplit") {
      steps.push_back({.kind = Kind::search,
                       .searched = Searched::text(read.text(part, "delimiter")),
                       .behavior = SplitBehavior::removed});
    } else if (type == "Digits") {
      steps.push_back({.kind = read.flag(part, "individual_digits", false) ? Kind::digits : Kind::digit_runs});
    } else if (type == "Punctuation") {
      steps.push_back({.kind = Kind::punctuation,
                       .behavior = JsonReader::member(part, "behavior") == nullptr ? SplitBehavior::isolated
                                                                                   : behavior_of(read, part)});
    } else if (type == "Whitespace") {
      steps.push_back({.kind = Kind::words});
    } else if (type == "WhitespaceSplit") {
      steps.push_back({.kind = Kind::white_space});
    } else if (type == "BertPreTokenizer") {
      steps.push_back({.kind = Kind::bert});
    } else if (type == "Metaspace") {
      steps.push_back(metaspace_of(read, part));
    } else {
      fail("{}: the pre-tokenizer {} is not supported", read.what(), in_quotes(type));
    }
  });
  return result;
}

Decoder decoder_of(const JsonReader& read, const JsonValue& json) {
  using Kind = DecoderStep::Kind;
  Decoder steps;
  const auto count = [&](const JsonValue& part, const char* name) {
    const std::int64_t number = read.number(part, name);
    read.require(number >= 0, "{} is {}, expected at least 0", name, number);
    return static_cast<std::size_t>(number);
  };
  read.for_each_part(json, "decoders", [&](const JsonValue& part, const std::string& type) {
    if (type == "ByteLevel") {
      steps.push_back({.kind = Kind::byte_level});
    } else if (type == "Replace") {
      steps.push_back({.kind = Kind::replace, .searched = searched_of(read, part), .text = read.text(part, "content")});
    } else if (type == "ByteFallback") {
      steps.push_back({.kind = Kind::byte_tokens});
    } else if (type == "Fuse") {
      steps.push_back({.kind = Kind::fuse});
    } else if (type == "Strip") {
      steps.push_back({.kind = Kind::strip,
                       .text = read.text(part, "content"),
                       .start = count(part, "start"),
                       .stop = count(part, "stop")});
      read.require(!steps.back().text.empty(), "the content of Strip is empty");
    } else if (type == "Metaspace") {
      const PreTokenizerStep space = metaspace_of(read, part);
      steps.push_back({.kind = Kind::metaspace,
                       .text = space.text,
                       .drops_first = space.prepend != PreTokenizerStep::Prepend::never});
    } else if (type == "WordPiece") {
      steps.push_back(
          {.kind = Kind::word_piece, .text = read.text(part, "prefix"), .cleans_up = read.flag(part, "cleanup", true)});
    } else if (type == "BPEDecoder") {
      steps.push_back({.kind = Kind::suffix, .text = read.text(part, "suffix")});
    } else {
      fail("{}: the decoder {} is not supported", read.what(), in_quotes(type));
    }
  });
  return steps;
}

}  // namespace mica::io::detail
