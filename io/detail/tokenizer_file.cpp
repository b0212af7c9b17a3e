#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/byte_alphabet.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/tokenizer_file.h>

namespace mica::io::detail {

namespace {

/// Reads members of JSON objects, with errors that name the member.
class Reader {
 public:
  explicit Reader(const std::string& what) : what_(what) {}

  template <class... Args>
  void require(bool ok, fmt::format_string<Args...> message, Args&&... args) const {
    if (!ok) [[unlikely]] {
      fail("{}: {}", what_, fmt::format(message, std::forward<Args>(args)...));
    }
  }

  // Null for a member that is absent or null.
  static const JsonValue* member(const JsonValue& json, const std::string& name) {
    const JsonValue* const found = json.find(name);
    return found == nullptr || found->is_null() ? nullptr : found;
  }
  template <class T>
  const T& get(const JsonValue& json, const std::string& name, const char* kind) const {
    const JsonValue* const found = member(json, name);
    const T* const value = found == nullptr ? nullptr : found->as<T>();
    require(value != nullptr, "expected {} as \"{}\"", kind, name);
    return *value;
  }
  const std::string& text(const JsonValue& json, const std::string& name) const {
    return get<std::string>(json, name, "a text");
  }
  const JsonValue::Array& list(const JsonValue& json, const std::string& name) const {
    return get<JsonValue::Array>(json, name, "a list");
  }
  bool flag(const JsonValue& json, const std::string& name, bool otherwise) const {
    return member(json, name) == nullptr ? otherwise : get<bool>(json, name, "true or false");
  }
  std::int64_t number(const JsonValue& json, const std::string& name) const {
    return get<std::int64_t>(json, name, "a whole number");
  }

  const std::string& what() const { return what_; }

 private:
  const std::string& what_;
};

AddedToken added_token(const Reader& read, const JsonValue& json, std::int64_t id) {
  AddedToken token{.id = id,
                   .content = read.text(json, "content"),
                   .single_word = read.flag(json, "single_word", false),
                   .strip_left = read.flag(json, "lstrip", false),
                   .strip_right = read.flag(json, "rstrip", false),
                   .special = read.flag(json, "special", false)};
  token.normalized = read.flag(json, "normalized", !token.special);
  read.require(token.content.size() <= kLongestAddedToken, "the added token {} has {} bytes, expected at most {}",
               in_quotes(token.content), token.content.size(), kLongestAddedToken);
  return token;
}

/// Collects the vocabulary: the model's tokens, then the added ones.
class VocabularyBuilder {
 public:
  // With `of_bytes`, tokens are written in GPT-2's byte alphabet; otherwise as plain text.
  VocabularyBuilder(const Reader& read, const JsonValue::Object& vocabulary, bool of_bytes = true) : read_(read) {
    entries_.reserve(vocabulary.size());
    for (const auto& [text, id] : vocabulary) {
      const auto* const number = id.as<std::int64_t>();
      read_.require(number != nullptr, "the id of the token {} is not a whole number", in_quotes(text));
      const std::optional<std::string> bytes = of_bytes ? alphabet_.bytes(text) : text;
      // A token with characters outside the alphabet cannot result from bytes; it stands for its own text.
      entries_.push_back({.id = *number, .text = text, .is_bytes = bytes.has_value(), .bytes = bytes.value_or(text)});
    }
    model_ = &vocabulary;
  }

  // An added token may be one of the model's.
  void add(const AddedToken& token) {
    const auto found = model_->find(token.content);
    if (found == model_->end()) {
      entries_.push_back({.id = token.id, .text = token.content, .bytes = token.content});
      return;
    }
    const std::int64_t id = *found->second.as<std::int64_t>();
    read_.require(id == token.id, "the added token {} has the id {}, but {} in the vocabulary",
                  in_quotes(token.content), token.id, id);
  }

  Vocabulary vocabulary() && { return {std::move(entries_), read_.what()}; }

 private:
  const Reader& read_;
  const JsonValue::Object* model_;
  ByteAlphabet alphabet_;
  std::vector<Vocabulary::Entry> entries_;
};

Merge merge_of(const Vocabulary& vocabulary, std::string_view left, std::string_view right, const std::string& what) {
  const auto id = [&](const std::string& text) {
    const std::int64_t found = vocabulary.id_of_text(text);
    check(found >= 0, "{}: the merge of {} and {} needs the token {}, which the vocabulary lacks", what,
          in_quotes(left), in_quotes(right), in_quotes(text));
    return static_cast<std::uint32_t>(found);
  };
  return {id(std::string(left)), id(std::string(right)), id(std::string(left) + std::string(right))};
}

std::vector<Merge> merges_of(const Reader& read, const JsonValue& model, const Vocabulary& vocabulary) {
  std::vector<Merge> merges;
  for (const JsonValue& entry : read.list(model, "merges")) {
    if (const auto* const text = entry.as<std::string>()) {
      merges.push_back(merge_of(vocabulary, *text, read.what()));
      continue;
    }
    const auto* const pair = entry.as<JsonValue::Array>();
    const bool is_pair = pair != nullptr && pair->size() == 2 && (*pair)[0].as<std::string>() != nullptr &&
                         (*pair)[1].as<std::string>() != nullptr;
    read.require(is_pair, "expected two tokens as merge {}", merges.size());
    merges.push_back(merge_of(vocabulary, *(*pair)[0].as<std::string>(), *(*pair)[1].as<std::string>(), read.what()));
  }
  return merges;
}

void check_model(const Reader& read, const JsonValue& model) {
  if (Reader::member(model, "type") != nullptr) {
    const std::string& type = read.text(model, "type");
    read.require(type == "BPE", "models of type {} are not supported, only BPE and WordPiece", in_quotes(type));
  }
  for (const char* const name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    read.require(Reader::member(model, name) == nullptr || read.text(model, name).empty(), "{} is not supported", name);
  }
  read.require(!read.flag(model, "byte_fallback", false),
               "byte_fallback is not supported, only byte-level byte-pair encoding");
}

// Visits the steps of a Sequence, or the single step.
template <class Visit>
void for_each_part(const Reader& read, const JsonValue& json, const char* list, Visit&& visit) {
  if (read.text(json, "type") == "Sequence") {
    for (const JsonValue& part : read.list(json, list)) {
      for_each_part(read, part, list, visit);
    }
  } else {
    visit(json, read.text(json, "type"));
  }
}

bool is_word_piece(const JsonValue& model) {
  const JsonValue* const type = Reader::member(model, "type");
  return type != nullptr && type->as<std::string>() != nullptr && *type->as<std::string>() == "WordPiece";
}

void read_normalizer(const Reader& read, const JsonValue& json, TokenizerDescription& out) {
  const JsonValue* const normalizer = Reader::member(json, "normalizer");
  if (normalizer == nullptr) {
    return;
  }
  for_each_part(read, *normalizer, "normalizers", [&](const JsonValue& part, const std::string& type) {
    if (type == "NFC" && !out.bert) {
      out.is_nfc = true;
    } else if (type == "BertNormalizer" && !out.is_nfc && !out.bert) {
      const bool lower_case = read.flag(part, "lowercase", true);
      out.bert = {.clean_text = read.flag(part, "clean_text", true),
                  .separate_chinese = read.flag(part, "handle_chinese_chars", true),
                  .strip_accents = read.flag(part, "strip_accents", lower_case),
                  .lower_case = lower_case};
    } else {
      fail("{}: the normalizer {} is not supported, only NFC or BertNormalizer", read.what(), in_quotes(type));
    }
  });
}

void read_word_piece(const Reader& read, const JsonValue& json, const JsonValue& model, TokenizerDescription& out) {
  const std::string& unknown = read.text(model, "unk_token");
  const std::int64_t id = out.vocabulary.id_of_text(unknown);
  read.require(id >= 0, "the vocabulary lacks the unknown token {}", in_quotes(unknown));
  const std::string& prefix = read.text(model, "continuing_subword_prefix");
  constexpr std::int64_t longest = 4096;  // the encoder takes quadratic time
  const std::int64_t most = Reader::member(model, "max_input_chars_per_word") == nullptr
                                ? 100
                                : read.number(model, "max_input_chars_per_word");
  read.require(most >= 0 && most <= longest, "max_input_chars_per_word is {}, expected at most {}", most, longest);
  out.word_piece.emplace(prefix, id, most);
  const JsonValue* const words = Reader::member(json, "pre_tokenizer");
  read.require(words != nullptr && read.text(*words, "type") == "BertPreTokenizer",
               "expected BertPreTokenizer as the pre-tokenizer of WordPiece");
  if (const JsonValue* const decoder = Reader::member(json, "decoder")) {
    read.require(read.text(*decoder, "type") == "WordPiece" && read.text(*decoder, "prefix") == prefix,
                 "expected the decoder WordPiece with the prefix {}", in_quotes(prefix));
    out.word_piece->cleans_up = read.flag(*decoder, "cleanup", true);
  }
}

Pattern pattern_of(const Reader& read, const JsonValue& split) {
  const JsonValue* const pattern = Reader::member(split, "pattern");
  read.require(pattern != nullptr && Reader::member(*pattern, "Regex") != nullptr,
               "expected a regular expression as the pattern of Split");
  const std::string& expression = read.text(*pattern, "Regex");
  read.require(read.text(split, "behavior") == "Isolated" && !read.flag(split, "invert", false),
               "Split is supported with the behavior Isolated, and not inverted");
  for (const Pattern known : {Pattern::gpt2, Pattern::llama3, Pattern::qwen}) {
    if (expression == regular_expression(known)) {
      return known;
    }
  }
  fail("{}: the regular expression {} is not supported, only those of GPT-2, Llama 3 and Qwen 2 to 3", read.what(),
       in_quotes(expression));
}

PreTokenizer pre_tokenizer_of(const Reader& read, const JsonValue& json) {
  using Kind = PreTokenizerStep::Kind;
  PreTokenizer steps;
  bool is_byte_level = false;
  const JsonValue* const pre_tokenizer = Reader::member(json, "pre_tokenizer");
  read.require(pre_tokenizer != nullptr, "expected a byte-level pre_tokenizer, got none");
  for_each_part(read, *pre_tokenizer, "pretokenizers", [&](const JsonValue& part, const std::string& type) {
    read.require(!is_byte_level, "expected ByteLevel as the last pre-tokenizer, got {} after it", in_quotes(type));
    if (type == "ByteLevel") {
      is_byte_level = true;
      if (read.flag(part, "add_prefix_space", true)) {
        steps.push_back({.kind = Kind::leading_space});
      }
      if (read.flag(part, "use_regex", true)) {
        steps.push_back({.kind = Kind::pattern, .pattern = Pattern::gpt2});
      }
    } else if (type == "Split") {
      steps.push_back({.kind = Kind::pattern, .pattern = pattern_of(read, part)});
    } else if (type == "Digits") {
      steps.push_back({.kind = read.flag(part, "individual_digits", false) ? Kind::digits : Kind::digit_runs});
    } else {
      fail("{}: the pre-tokenizer {} is not supported", read.what(), in_quotes(type));
    }
  });
  read.require(is_byte_level, "expected ByteLevel as the last pre-tokenizer: other models are not supported");
  return steps;
}

void check_decoder(const Reader& read, const JsonValue& json) {
  if (const JsonValue* const decoder = Reader::member(json, "decoder")) {
    for_each_part(read, *decoder, "decoders", [&](const JsonValue&, const std::string& type) {
      read.require(type == "ByteLevel", "the decoder {} is not supported, only ByteLevel", in_quotes(type));
    });
  }
}

/// Reads the special tokens that a post-processor places around a text.
class FrameReader {
 public:
  FrameReader(const Reader& read, TokenizerDescription& description) : read_(read), out_(description) {}

  void operator()(const JsonValue& processor, const std::string& type) {
    if (type == "ByteLevel") {
      return;  // changes offsets only
    }
    read_.require(out_.before.empty() && out_.after.empty(), "more than one post-processor adds tokens");
    if (type == "TemplateProcessing") {
      read_template(processor);
    } else if (type == "BertProcessing" || type == "RobertaProcessing") {
      out_.before.push_back(token_of(processor, "cls"));
      out_.after.push_back(token_of(processor, "sep"));
    } else {
      fail("{}: the post-processor {} is not supported", read_.what(), in_quotes(type));
    }
  }

 private:
  // ["</s>", 2]
  std::int64_t token_of(const JsonValue& processor, const char* name) const {
    const JsonValue::Array& pair = read_.list(processor, name);
    const auto* const id = pair.size() == 2 ? pair[1].as<std::int64_t>() : nullptr;
    read_.require(id != nullptr, "expected a token and its id as \"{}\"", name);
    return known(*id);
  }
  std::int64_t known(std::int64_t id) const {
    read_.require(out_.vocabulary.has(id), "the post-processor adds the token {}, which the vocabulary lacks", id);
    return id;
  }

  void read_template(const JsonValue& processor) {
    bool has_text = false;
    for (const JsonValue& part : read_.list(processor, "single")) {
      if (const JsonValue* const sequence = Reader::member(part, "Sequence")) {
        read_.require(!has_text && read_.text(*sequence, "id") == "A", "expected one Sequence A in \"single\"");
        has_text = true;
        continue;
      }
      const JsonValue* const special = Reader::member(part, "SpecialToken");
      read_.require(special != nullptr, "expected a Sequence or SpecialToken in \"single\"");
      const std::string& name = read_.text(*special, "id");
      const JsonValue* const all = Reader::member(processor, "special_tokens");
      const JsonValue* const entry = all == nullptr ? nullptr : Reader::member(*all, name);
      read_.require(entry != nullptr, "\"special_tokens\" lack {}", in_quotes(name));
      for (const JsonValue& id : read_.list(*entry, "ids")) {
        read_.require(id.as<std::int64_t>() != nullptr, "expected whole numbers as \"ids\"");
        (has_text ? out_.after : out_.before).push_back(known(*id.as<std::int64_t>()));
      }
    }
    read_.require(has_text, "expected a Sequence in \"single\"");
  }

  const Reader& read_;
  TokenizerDescription& out_;
};

std::optional<std::string> token_setting(const Reader& read, const JsonValue& json, const std::string& name) {
  const JsonValue* const found = Reader::member(json, name);
  if (found == nullptr) {
    return std::nullopt;
  }
  // A text, or an added token.
  return found->as<std::string>() != nullptr ? *found->as<std::string>() : read.text(*found, "content");
}

}  // namespace

Merge merge_of(const Vocabulary& vocabulary, std::string_view pair, const std::string& what) {
  const std::size_t space = pair.find(' ');
  check(space != std::string_view::npos && pair.find(' ', space + 1) == std::string_view::npos,
        "{}: expected a merge of two tokens with a space between them, got {}", what, in_quotes(pair));
  return merge_of(vocabulary, pair.substr(0, space), pair.substr(space + 1), what);
}

TokenizerDescription describe_tokenizer(const JsonValue& json, const std::string& what) {
  const Reader read(what);
  const JsonValue* const model = Reader::member(json, "model");
  read.require(model != nullptr, "expected a \"model\"");
  TokenizerDescription result;
  const bool has_pieces = is_word_piece(*model);
  if (!has_pieces) {
    check_model(read, *model);
    check_decoder(read, json);
  }
  VocabularyBuilder builder(read, read.get<JsonValue::Object>(*model, "vocab", "an object"), !has_pieces);
  if (Reader::member(json, "added_tokens") != nullptr) {
    for (const JsonValue& entry : read.list(json, "added_tokens")) {
      AddedToken token = added_token(read, entry, read.number(entry, "id"));
      if (!token.content.empty()) {
        builder.add(token);
        result.added_tokens.push_back(std::move(token));
      }
    }
  }
  result.vocabulary = std::move(builder).vocabulary();
  read_normalizer(read, json, result);
  if (has_pieces) {
    read_word_piece(read, json, *model, result);
  } else {
    result.merges = merges_of(read, *model, result.vocabulary);
    result.ignore_merges = read.flag(*model, "ignore_merges", false);
    result.pre_tokenizer = pre_tokenizer_of(read, json);
  }
  if (const JsonValue* const processor = Reader::member(json, "post_processor")) {
    for_each_part(read, *processor, "processors", FrameReader(read, result));
  }
  return result;
}

TokenizerDescription describe_tokenizer(const JsonValue& vocabulary, std::string_view merges,
                                        const TokenizerSettings& settings, const std::string& what) {
  const Reader read(what);
  const auto* const tokens = vocabulary.as<JsonValue::Object>();
  read.require(tokens != nullptr, "expected an object");
  const bool is_qwen = settings.tokenizer_class.starts_with("Qwen2Tokenizer");
  const bool is_gpt2 = settings.tokenizer_class.empty() || settings.tokenizer_class.starts_with("GPT2Tokenizer");
  read.require(
      is_qwen || is_gpt2,
      "without tokenizer.json, tokenizers of class {} are not supported, only GPT2Tokenizer and Qwen2Tokenizer",
      in_quotes(settings.tokenizer_class));

  TokenizerDescription result;
  VocabularyBuilder builder(read, *tokens);
  result.added_tokens = settings.added_tokens;
  // GPT-2's only special token is in its vocabulary.
  constexpr const char* end_of_text = "<|endoftext|>";
  if (const auto found = tokens->find(end_of_text); result.added_tokens.empty() && found != tokens->end()) {
    const auto* const id = found->second.as<std::int64_t>();
    read.require(id != nullptr, "the id of {} is not a whole number", end_of_text);
    result.added_tokens.push_back({.id = *id, .content = end_of_text, .normalized = false, .special = true});
  }
  for (const AddedToken& token : result.added_tokens) {
    builder.add(token);
  }
  result.vocabulary = std::move(builder).vocabulary();
  bool is_first = true;
  while (!merges.empty()) {
    const std::size_t end = std::min(merges.find('\n'), merges.size());
    std::string_view line = merges.substr(0, end);
    merges.remove_prefix(std::min(end + 1, merges.size()));
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    const bool is_version = std::exchange(is_first, false) && line.starts_with("#version");
    if (!line.empty() && !is_version) {
      result.merges.push_back(merge_of(result.vocabulary, line, what));
    }
  }
  result.is_nfc = is_qwen;
  result.pre_tokenizer = {
      {.kind = PreTokenizerStep::Kind::pattern, .pattern = is_qwen ? Pattern::qwen : Pattern::gpt2}};
  return result;
}

TokenizerSettings tokenizer_settings(const JsonValue& json, const std::string& what) {
  const Reader read(what);
  TokenizerSettings result;
  if (Reader::member(json, "tokenizer_class") != nullptr) {
    result.tokenizer_class = read.text(json, "tokenizer_class");
  }
  result.bos_token = token_setting(read, json, "bos_token");
  result.eos_token = token_setting(read, json, "eos_token");
  result.pad_token = token_setting(read, json, "pad_token");
  if (const JsonValue* const chat = Reader::member(json, "chat_template")) {
    if (const auto* const text = chat->as<std::string>()) {
      result.chat_template = *text;
    } else {
      // A list of named templates.
      for (const JsonValue& named : read.list(json, "chat_template")) {
        if (read.text(named, "name") == "default") {
          result.chat_template = read.text(named, "template");
        }
      }
    }
  }
  if (Reader::member(json, "added_tokens_decoder") != nullptr) {
    for (const auto& [id, entry] : read.get<JsonValue::Object>(json, "added_tokens_decoder", "an object")) {
      std::int64_t number = 0;
      const char* const end = id.data() + id.size();
      const auto [last, error] = std::from_chars(id.data(), end, number);
      read.require(error == std::errc() && last == end, "expected the ids of tokens in added_tokens_decoder, got {}",
                   in_quotes(id));
      AddedToken token = added_token(read, entry, number);
      if (!token.content.empty()) {
        result.added_tokens.push_back(std::move(token));
      }
    }
  }
  return result;
}

}  // namespace mica::io::detail
