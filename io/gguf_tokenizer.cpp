// Tokenizers in the metadata of GGUF files. For the meaning of the keys and of the names of pre-tokenizers, see
// src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp; for how its conversion writes them, conversion/base.py.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/detail/byte_alphabet.h>
#include <mica/io/detail/gguf_entries.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/sentence_piece.h>
#include <mica/io/detail/tokenizer_file.h>
#include <mica/io/detail/tokenizer_parts.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/gguf_tokenizer.h>

namespace mica::io {

namespace {

using detail::AddedToken;
using detail::GgufEntries;
using detail::in_quotes;
using detail::Merge;
using detail::Pattern;
using detail::PreTokenizer;
using detail::PreTokenizerStep;
using detail::SentencePieceModel;
using detail::TokenizerDescription;
using detail::TokenizerParts;
using detail::TokenizerSettings;
using detail::Vocabulary;

constexpr const char* kModelKey = "tokenizer.ggml.model";
constexpr const char* kPreKey = "tokenizer.ggml.pre";
constexpr const char* kTokensKey = "tokenizer.ggml.tokens";
constexpr const char* kTypesKey = "tokenizer.ggml.token_type";
constexpr const char* kMergesKey = "tokenizer.ggml.merges";
constexpr const char* kScoresKey = "tokenizer.ggml.scores";
constexpr const char* kMapKey = "tokenizer.ggml.precompiled_charsmap";
constexpr const char* kRemoveSpacesKey = "tokenizer.ggml.remove_extra_whitespaces";
constexpr const char* kSpacePrefixKey = "tokenizer.ggml.add_space_prefix";
constexpr const char* kUnknownKey = "tokenizer.ggml.unknown_token_id";
constexpr const char* kBosKey = "tokenizer.ggml.bos_token_id";
constexpr const char* kEosKey = "tokenizer.ggml.eos_token_id";
constexpr const char* kEotKey = "tokenizer.ggml.eot_token_id";
constexpr const char* kEomKey = "tokenizer.ggml.eom_token_id";
constexpr const char* kPadKey = "tokenizer.ggml.padding_token_id";
constexpr const char* kAddBosKey = "tokenizer.ggml.add_bos_token";
constexpr const char* kAddEosKey = "tokenizer.ggml.add_eos_token";
constexpr const char* kChatTemplateKey = "tokenizer.chat_template";

enum TokenType : std::int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5 };

/// The steps of a pre-tokenizer, and its names.
struct Recipe {
  PreTokenizer steps;
  bool is_nfc = false, ignore_merges = false;
  bool adds_bos = false;  ///< if the file does not say
  /// save_gguf writes the first one. llama.cpp treats all of them alike.
  std::vector<std::string_view> names;
};

std::span<const Recipe> recipes() {
  using Kind = PreTokenizerStep::Kind;
  static const std::array<Recipe, 6> all{{
      {.steps = {{.kind = Kind::pattern, .pattern = Pattern::gpt2}},
       .names = {"gpt-2", "phi-2", "roberta-bpe", "jais", "gigachat", "mellum", "exaone4", "trillion",
                 "granite-docling", "mpt", "olmo"}},
      {.steps = {{.kind = Kind::digits}, {.kind = Kind::pattern, .pattern = Pattern::gpt2}},
       .names = {"smollm", "starcoder", "refact", "codeshell", "minerva-7b", "mellum2", "command-r", "exaone"}},
      {.steps = {{.kind = Kind::pattern, .pattern = Pattern::llama3}},
       .ignore_merges = true,
       .adds_bos = true,
       .names = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}},
      {.steps = {{.kind = Kind::pattern, .pattern = Pattern::llama3}}, .names = {"smaug-bpe", "dbrx"}},
      // Qwen's own tokenizers normalize texts to form C. The file does not say so, and llama.cpp does not do it.
      {.steps = {{.kind = Kind::pattern, .pattern = Pattern::qwen}}, .is_nfc = true, .names = {"qwen2"}},
      {.steps = {{.kind = Kind::pattern, .pattern = Pattern::qwen}},
       .names = {"deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo", "f2llmv2", "grok-2", "solar-open"}},
  }};
  return all;
}

detail::Normalizer normalizer_of(const Recipe& recipe) {
  using Kind = detail::NormalizerStep::Kind;
  return recipe.is_nfc ? detail::Normalizer{{.kind = Kind::form, .form = detail::NormalForm::c}} : detail::Normalizer{};
}

const Recipe& recipe_of(const GgufEntries& entries) {
  check(entries.has(kPreKey), "{}: the metadata lack \"{}\", which says how the tokenizer cuts a text into words",
        entries.what(), kPreKey);
  const std::string& name = entries.text(kPreKey);
  std::string known;
  for (const Recipe& recipe : recipes()) {
    if (std::find(recipe.names.begin(), recipe.names.end(), name) != recipe.names.end()) {
      return recipe;
    }
    known += (known.empty() ? "" : ", ") + std::string(recipe.names.front());
  }
  fail("{}: the pre-tokenizer {} is not supported, only {} and their other names", entries.what(), in_quotes(name),
       known);
}

const std::string& utf8(const GgufEntries& entries, const std::string& key, const std::string& text) {
  check(detail::valid_utf8_length(text) == text.size(), "{}: a text in \"{}\" is not UTF-8", entries.what(), key);
  return text;
}

const std::vector<std::string>& tokens_of(const GgufEntries& entries) {
  return *entries.needed(kTokensKey, entries.find<std::vector<std::string>>(kTokensKey, "a list of texts"));
}

/// The types of the tokens, from the file; all normal if it has none.
std::vector<std::int32_t> types_of(const GgufEntries& entries, std::size_t tokens) {
  const auto* const types = entries.find<std::vector<std::int32_t>>(kTypesKey, "a list of numbers of type int32");
  if (types == nullptr) {
    return std::vector<std::int32_t>(tokens, kNormal);
  }
  check(types->size() == tokens, "{}: \"{}\" has {} tokens and \"{}\" {} types", entries.what(), kTokensKey, tokens,
        kTypesKey, types->size());
  return *types;
}

std::optional<std::int64_t> token_id(const GgufEntries& entries, const std::string& key, std::size_t tokens) {
  const std::optional<std::int64_t> id = entries.integer(key);
  check(!id || (*id >= 0 && *id < static_cast<std::int64_t>(tokens)),
        "{}: \"{}\" is {}, which is not one of the {} tokens", entries.what(), key, id.value_or(0), tokens);
  return id;
}

bool has_usual_name_of_end(std::string_view token) {
  constexpr std::array<std::string_view, 8> names{"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
                                                  "<|im_end|>",    "<|end|>",         "</s>",       "<end_of_turn>"};
  return std::find(names.begin(), names.end(), token) != names.end();
}

std::vector<std::int64_t> end_tokens_of(const GgufEntries& entries) {
  const std::vector<std::string>& tokens = tokens_of(entries);
  const std::vector<std::int32_t> types = types_of(entries, tokens.size());
  std::set<std::int64_t> ends;
  for (const char* const key : {kEosKey, kEotKey, kEomKey}) {
    if (const auto id = token_id(entries, key, tokens.size())) {
      ends.insert(*id);
    }
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if ((types[i] == kControl || types[i] == kUnknown) && has_usual_name_of_end(tokens[i])) {
      ends.insert(static_cast<std::int64_t>(i));
    }
  }
  return {ends.begin(), ends.end()};
}

/// Reads the tokens, and which of them are added tokens.
void read_tokens(const GgufEntries& entries, TokenizerDescription& out) {
  const std::vector<std::string>& tokens = tokens_of(entries);
  const std::vector<std::int32_t> types = types_of(entries, tokens.size());
  const detail::ByteAlphabet alphabet;
  std::vector<Vocabulary::Entry> all;
  all.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<std::int64_t>(i);
    const std::string& text = utf8(entries, kTokensKey, tokens[i]);
    if (text.empty() || types[i] == kUnused) {  // padding: has no text, although a model may draw it
      all.push_back({.id = id, .text = text.empty() ? fmt::format("[EMPTY_{}]", i) : text});
      continue;
    }
    switch (types[i]) {
      case kNormal: {
        const std::optional<std::string> bytes = alphabet.bytes(text);
        all.push_back({.id = id, .text = text, .is_bytes = bytes.has_value(), .bytes = bytes.value_or(text)});
        break;
      }
      case kUnknown:
      case kControl:
      case kUserDefined:
        check(text.size() <= detail::kLongestAddedToken, "{}: the token {} has {} bytes, expected at most {}",
              entries.what(), in_quotes(text), text.size(), detail::kLongestAddedToken);
        all.push_back({.id = id, .text = text, .bytes = text});
        out.added_tokens.push_back(
            {.id = id, .content = text, .normalized = false, .special = types[i] != kUserDefined});
        break;
      default:
        fail("{}: the type {} of the token {} is not supported in byte-level byte-pair encoding", entries.what(),
             types[i], in_quotes(text));
    }
  }
  out.vocabulary = Vocabulary(std::move(all), entries.what());
}

/// Which tokens are added to a text if the file does not say.
struct Frame {
  bool adds_bos, adds_eos;
};

TokenizerDescription byte_level(const GgufEntries& entries, Frame& frame) {
  const Recipe& recipe = recipe_of(entries);
  TokenizerDescription description;
  description.pre_tokenizer = recipe.steps;
  description.normalizer = normalizer_of(recipe);
  description.byte_pair.ignore_merges = recipe.ignore_merges;
  frame.adds_bos = recipe.adds_bos;
  read_tokens(entries, description);
  const auto& merges =
      *entries.needed(kMergesKey, entries.find<std::vector<std::string>>(kMergesKey, "a list of texts"));
  description.merges.reserve(merges.size());
  for (const std::string& merge : merges) {
    description.merges.push_back(
        detail::merge_of(description.vocabulary, utf8(entries, kMergesKey, merge), entries.what()));
  }
  return description;
}

std::string character_map_of(const GgufEntries& entries) {
  if (!entries.has(kMapKey)) {
    return "";
  }
  if (const auto* const bytes = entries.find_as<std::vector<std::uint8_t>>(kMapKey)) {
    return {bytes->begin(), bytes->end()};
  }
  const auto& bytes = *entries.needed(kMapKey, entries.find<std::vector<std::int8_t>>(kMapKey, "a list of bytes"));
  return {bytes.begin(), bytes.end()};
}

SentencePieceModel sentence_piece_of(const GgufEntries& entries, const std::string& model) {
  const std::vector<std::string>& tokens = tokens_of(entries);
  const std::vector<std::int32_t> types = types_of(entries, tokens.size());
  const auto& scores =
      *entries.needed(kScoresKey, entries.find<std::vector<float>>(kScoresKey, "a list of numbers of type float32"));
  check(scores.size() == tokens.size(), "{}: \"{}\" has {} tokens and \"{}\" {} scores", entries.what(), kTokensKey,
        tokens.size(), kScoresKey, scores.size());
  const auto flag = [&](const char* key, bool otherwise) {
    const bool* const value = entries.find<bool>(key, "a bool");
    return value != nullptr ? *value : otherwise;
  };
  const std::optional<std::int64_t> unknown = token_id(entries, kUnknownKey, tokens.size());
  SentencePieceModel result{.pieces = {},
                            .is_unigram = model == "t5",
                            .unknown_token = unknown.value_or(model == "t5" ? 2 : 0),
                            .character_map = character_map_of(entries),
                            .removes_spaces = flag(kRemoveSpacesKey, false),
                            .adds_prefix = flag(kSpacePrefixKey, true),
                            .finds_in_raw_text = true};
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    check(!std::isnan(scores[i]), "{}: score {} in \"{}\" is not a number", entries.what(), i, kScoresKey);
    result.has_byte_tokens = result.has_byte_tokens || types[i] == SentencePieceModel::byte;
    result.pieces.push_back({utf8(entries, kTokensKey, tokens[i]), scores[i], types[i]});
  }
  return result;
}

/// A name such as "[PAD7]" for an unused number.
std::string padding_name(const Vocabulary& vocabulary, std::int64_t id) {
  std::string name = fmt::format("[PAD{}]", id);
  while (vocabulary.id_of_text(name) >= 0) {
    name += '_';
  }
  return name;
}

/// The token before or after a text, if there is one. Throws if there are several, or an unusual one.
std::optional<std::int64_t> single(const std::vector<std::int64_t>& tokens, std::optional<std::int64_t> usual,
                                   const char* kind) {
  if (tokens.empty()) {
    return std::nullopt;
  }
  check(tokens.size() == 1 && (!usual || *usual == tokens[0]),
        "gguf_metadata: the tokenizer adds {} tokens at the {} of a text, and llama.cpp only the {} token",
        tokens.size(), kind, kind[0] == 'b' ? "bos" : "eos");
  return tokens[0];
}

}  // namespace

bool has_gguf_tokenizer(const GgufMetadata& metadata) {
  const GgufEntries entries(metadata, "has_gguf_tokenizer");
  return entries.has(kModelKey) && entries.text(kModelKey) != "none" && entries.text(kModelKey) != "no_vocab";
}

Tokenizer gguf_tokenizer(const GgufMetadata& metadata, const std::string& what) {
  const GgufEntries entries(metadata, what);
  check(has_gguf_tokenizer(metadata), "{}: it has no tokenizer", what);
  const std::string& model = entries.text(kModelKey);
  check(model == "gpt2" || model == "llama" || model == "t5",
        "{}: the tokenizer is of the model {}{}, which is not supported, only \"gpt2\", \"llama\" and \"t5\"", what,
        in_quotes(model), model == "bert" ? ", WordPiece" : "");
  Frame frame{.adds_bos = model == "llama", .adds_eos = model == "t5"};
  TokenizerDescription description =
      model == "gpt2" ? byte_level(entries, frame) : describe_sentence_piece(sentence_piece_of(entries, model), what);

  TokenizerSettings settings;
  const Vocabulary& vocabulary = description.vocabulary;
  const auto size = static_cast<std::size_t>(vocabulary.size());
  const auto read_id = [&](const std::string& key, std::optional<std::string>& token) {
    const std::optional<std::int64_t> id = token_id(entries, key, size);
    token = id ? std::optional(vocabulary[*id].text) : std::nullopt;
    return id;
  };
  const auto bos = read_id(kBosKey, settings.bos_token), eos = read_id(kEosKey, settings.eos_token);
  read_id(kEotKey, settings.eot_token);
  read_id(kEomKey, settings.eom_token);
  read_id(kPadKey, settings.pad_token);
  for (const auto& [name, token] : {std::pair{"bos_token", settings.bos_token},
                                    {"eos_token", settings.eos_token},
                                    {"pad_token", settings.pad_token}}) {
    if (token) {
      settings.named_tokens.emplace_back(name, *token);
    }
  }
  const auto add = [&](const std::string& flag, bool otherwise, std::optional<std::int64_t> id, const std::string& key,
                       std::vector<std::int64_t>& tokens) {
    const bool* const own = entries.find<bool>(flag, "a bool");
    if (own != nullptr ? *own : otherwise) {
      tokens.push_back(entries.needed(key, id));
    }
  };
  add(kAddBosKey, frame.adds_bos, bos, kBosKey, description.before);
  add(kAddEosKey, frame.adds_eos, eos, kEosKey, description.after);
  if (const auto* const jinja = entries.find<std::string>(kChatTemplateKey, "a text")) {
    settings.chat_template = utf8(entries, kChatTemplateKey, *jinja);
  }
  settings.end_tokens = end_tokens_of(entries);
  return TokenizerParts::tokenizer(std::move(description), std::move(settings), what);
}

std::vector<std::int64_t> gguf_end_tokens(const GgufMetadata& metadata) {
  return has_gguf_tokenizer(metadata) ? end_tokens_of(GgufEntries(metadata, "gguf_end_tokens"))
                                      : std::vector<std::int64_t>();
}

GgufMetadata gguf_metadata(const Tokenizer& tokenizer, std::int64_t vocabulary_size) {
  const TokenizerSettings& settings = TokenizerParts::settings(tokenizer);
  const TokenizerDescription description = TokenizerParts::description(tokenizer);
  check(!description.word_piece && !description.unigram && !description.byte_pair.of_characters,
        "gguf_metadata: only tokenizers with byte-pair encoding of bytes are supported");
  const auto recipe = std::find_if(recipes().begin(), recipes().end(), [&](const Recipe& r) {
    return r.steps == description.pre_tokenizer && normalizer_of(r) == description.normalizer &&
           detail::BytePairOptions{.ignore_merges = r.ignore_merges} == description.byte_pair;
  });
  check(recipe != recipes().end(), "gguf_metadata: llama.cpp has no tokenizer that prepares a text as this one does{}",
        std::any_of(description.pre_tokenizer.begin(), description.pre_tokenizer.end(),
                    [](const PreTokenizerStep& step) { return step.kind == PreTokenizerStep::Kind::leading_space; })
            ? ": it adds a space at the beginning"
            : "");
  const Vocabulary& vocabulary = description.vocabulary;
  check(vocabulary_size >= vocabulary.size(), "gguf_metadata: the tokenizer has {} tokens, but the model only {}",
        vocabulary.size(), vocabulary_size);
  check(vocabulary_size <= INT32_MAX, "gguf_metadata: expected at most {} tokens, got {}", INT32_MAX, vocabulary_size);

  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  for (std::int64_t id = 0; id < vocabulary_size; ++id) {
    const bool is_token = vocabulary.has(id);
    tokens.push_back(is_token ? vocabulary[id].text : padding_name(vocabulary, id));
    types.push_back(is_token && !vocabulary[id].bytes.empty() ? kNormal : kUnused);
  }
  for (const AddedToken& token : description.added_tokens) {
    const bool is_plain = !token.single_word && !token.strip_left && !token.strip_right;
    check(is_plain && !(token.normalized && !description.normalizer.empty()),
          "gguf_metadata: GGUF cannot express that the token {} is a single word, absorbs adjacent spaces or "
          "is searched for in the normalized text",
          in_quotes(token.content));
    types[static_cast<std::size_t>(token.id)] = token.special ? kControl : kUserDefined;
  }
  std::vector<std::string> merges;
  merges.reserve(description.merges.size());
  for (const Merge& merge : description.merges) {
    merges.push_back(vocabulary[merge.left].text + " " + vocabulary[merge.right].text);
    check(std::count(merges.back().begin(), merges.back().end(), ' ') == 1,
          "gguf_metadata: the merge {} is of tokens with spaces", in_quotes(merges.back()));
  }

  const auto bos = single(description.before, tokenizer.bos_token(), "beginning");
  const auto eos = single(description.after, tokenizer.eos_token(), "end");
  GgufMetadata result{{kModelKey, std::string("gpt2")}, {kPreKey, std::string(recipe->names.front())},
                      {kTokensKey, std::move(tokens)},  {kTypesKey, std::move(types)},
                      {kMergesKey, std::move(merges)},  {kAddBosKey, bos.has_value()},
                      {kAddEosKey, eos.has_value()}};
  const auto write_id = [&](const std::string& key, std::optional<std::int64_t> id) {
    if (id) {
      result[key] = static_cast<std::uint32_t>(*id);
    }
  };
  write_id(kBosKey, bos ? bos : tokenizer.bos_token());
  write_id(kEosKey, eos ? eos : tokenizer.eos_token());
  write_id(kPadKey, tokenizer.pad_token());
  write_id(kEotKey, settings.eot_token ? tokenizer.find(*settings.eot_token) : std::nullopt);
  write_id(kEomKey, settings.eom_token ? tokenizer.find(*settings.eom_token) : std::nullopt);
  if (!settings.chat_template.empty()) {
    result[kChatTemplateKey] = settings.chat_template;
  }
  return result;
}

}  // namespace mica::io
