#include <algorithm>
#include <charconv>
#include <set>
#include <unordered_map>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/byte_alphabet.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/json_reader.h>
#include <mica/io/detail/tokenizer_file.h>
#include <mica/io/detail/tokenizer_steps.h>

namespace mica::io::detail {

namespace {

AddedToken added_token(const JsonReader& read, const JsonValue& json, std::int64_t id) {
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
  VocabularyBuilder(const JsonReader& read, bool of_bytes) : read_(read), of_bytes_(of_bytes) {}

  // With `of_bytes`, tokens are written in GPT-2's byte alphabet; otherwise as plain text. One with characters outside
  // the alphabet cannot result from bytes; it stands for its own text.
  void add(const std::string& text, std::int64_t id) {
    const std::optional<std::string> bytes = of_bytes_ ? alphabet_.bytes(text) : text;
    ids_.emplace(text, id);
    size_ = std::max(size_, id < INT64_MAX ? id + 1 : id);
    entries_.push_back({.id = id, .text = text, .is_bytes = bytes.has_value(), .bytes = bytes.value_or(text)});
  }
  void add(const JsonValue::Object& vocabulary) {
    entries_.reserve(vocabulary.size());
    for (const auto& [text, id] : vocabulary) {
      const auto* const number = id.as<std::int64_t>();
      read_.require(number != nullptr, "the id of the token {} is not a whole number", in_quotes(text));
      add(text, *number);
    }
  }

  // An added token may be one of the model's.
  void add(AddedToken token) {
    if (token.content.empty()) {
      return;
    }
    const auto [found, is_new] = ids_.emplace(token.content, token.id);
    if (is_new) {
      size_ = std::max(size_, token.id < INT64_MAX ? token.id + 1 : token.id);
      entries_.push_back({.id = token.id, .text = token.content, .bytes = token.content});
    }
    read_.require(found->second == token.id, "the added token {} has the id {}, but {} in the vocabulary",
                  in_quotes(token.content), token.id, found->second);
    is_added_.insert(token.content);
    added_.push_back(std::move(token));
  }
  // Adds what tokenizer_config.json has and tokenizer.json lacks. Tokens without a number get the next ones.
  void add(const TokenizerSettings& settings) {
    for (const AddedToken& token : settings.added_tokens) {
      if (!is_added_.contains(token.content)) {
        add(token);
      }
    }
    for (AddedToken token : settings.special_tokens) {
      if (!is_added_.contains(token.content)) {
        const auto found = ids_.find(token.content);
        token.id = found == ids_.end() ? size_ : found->second;
        add(std::move(token));
      }
    }
  }

  void add(Vocabulary::Entry entry) {
    ids_.emplace(entry.text, entry.id);
    size_ = std::max(size_, entry.id + 1);
    entries_.push_back(std::move(entry));
  }

  void finish(TokenizerDescription& out) && {
    out.vocabulary = Vocabulary(std::move(entries_), read_.what());
    out.added_tokens = std::move(added_);
  }

 private:
  const JsonReader& read_;
  bool of_bytes_;
  ByteAlphabet alphabet_;
  std::unordered_map<std::string, std::int64_t> ids_;
  std::set<std::string> is_added_;
  std::vector<AddedToken> added_;
  std::int64_t size_ = 0;
  std::vector<Vocabulary::Entry> entries_;
};

Merge merge_of(const Vocabulary& vocabulary, std::string_view left, std::string_view right, const std::string& what,
               const std::string& prefix = {}) {
  const auto id = [&](const std::string& text) {
    const std::int64_t found = vocabulary.id_of_text(text);
    check(found >= 0, "{}: the merge of {} and {} needs the token {}, which the vocabulary lacks", what,
          in_quotes(left), in_quotes(right), in_quotes(text));
    return static_cast<std::uint32_t>(found);
  };
  const std::string_view joined = right.starts_with(prefix) ? right.substr(prefix.size()) : right;
  return {id(std::string(left)), id(std::string(right)), id(std::string(left) + std::string(joined))};
}

// Both parts of "left right".
std::pair<std::string_view, std::string_view> parts_of(std::string_view pair, const std::string& what) {
  const std::size_t space = pair.find(' ');
  check(space != std::string_view::npos && pair.find(' ', space + 1) == std::string_view::npos,
        "{}: expected a merge of two tokens with a space between them, got {}", what, in_quotes(pair));
  return {pair.substr(0, space), pair.substr(space + 1)};
}

std::vector<Merge> merges_of(const JsonReader& read, const JsonValue& model, const TokenizerDescription& out) {
  std::vector<Merge> merges;
  const auto add = [&](std::string_view left, std::string_view right) {
    merges.push_back(merge_of(out.vocabulary, left, right, read.what(), out.byte_pair.prefix));
  };
  for (const JsonValue& entry : read.list(model, "merges")) {
    if (const auto* const text = entry.as<std::string>()) {
      const auto [left, right] = parts_of(*text, read.what());
      add(left, right);
      continue;
    }
    const auto* const pair = entry.as<JsonValue::Array>();
    const bool is_pair = pair != nullptr && pair->size() == 2 && (*pair)[0].as<std::string>() != nullptr &&
                         (*pair)[1].as<std::string>() != nullptr;
    read.require(is_pair, "expected two tokens as merge {}", merges.size());
    add(*(*pair)[0].as<std::string>(), *(*pair)[1].as<std::string>());
  }
  return merges;
}

std::string text_or_empty(const JsonReader& read, const JsonValue& json, const char* name) {
  return JsonReader::member(json, name) == nullptr ? "" : read.text(json, name);
}

enum class ModelType { byte_pair, word_piece, unigram };

ModelType model_type_of(const JsonReader& read, const JsonValue& model) {
  if (JsonReader::member(model, "type") == nullptr) {  // old files
    const JsonValue* const vocabulary = JsonReader::member(model, "vocab");
    return vocabulary != nullptr && vocabulary->as<JsonValue::Array>() != nullptr ? ModelType::unigram
           : JsonReader::member(model, "merges") != nullptr                       ? ModelType::byte_pair
                                                                                  : ModelType::word_piece;
  }
  const std::string& type = read.text(model, "type");
  read.require(type == "BPE" || type == "WordPiece" || type == "Unigram",
               "models of type {} are not supported, only BPE, Unigram and WordPiece", in_quotes(type));
  return type == "BPE" ? ModelType::byte_pair : type == "Unigram" ? ModelType::unigram : ModelType::word_piece;
}

// [["token", score], …]; returns the scores.
std::vector<double> read_scores(const JsonReader& read, const JsonValue& model, VocabularyBuilder& builder) {
  std::vector<double> scores;
  for (const JsonValue& entry : read.list(model, "vocab")) {
    const auto* const pair = entry.as<JsonValue::Array>();
    const auto* const text = pair != nullptr && pair->size() == 2 ? (*pair)[0].as<std::string>() : nullptr;
    const auto* const real = text == nullptr ? nullptr : (*pair)[1].as<double>();
    const auto* const whole = text == nullptr ? nullptr : (*pair)[1].as<std::int64_t>();
    read.require(real != nullptr || whole != nullptr, "expected a text and a number as token {}", scores.size());
    builder.add(*text, static_cast<std::int64_t>(scores.size()));
    scores.push_back(real != nullptr ? *real : static_cast<double>(*whole));
  }
  return scores;
}

UnigramEncoder unigram_of(const JsonReader& read, const JsonValue& model, const Vocabulary& vocabulary,
                          std::vector<double> scores) {
  UnigramEncoder::Options options{.has_byte_tokens = read.flag(model, "byte_fallback", false)};
  if (JsonReader::member(model, "unk_id") != nullptr) {
    options.unknown = read.number(model, "unk_id");
    read.require(*options.unknown >= 0 && *options.unknown < static_cast<std::int64_t>(scores.size()),
                 "unk_id is {}, which is not one of the {} tokens", *options.unknown, scores.size());
  }
  return {vocabulary, std::move(scores), options};
}

WordPieceEncoder word_piece_of(const JsonReader& read, const JsonValue& model, const Vocabulary& vocabulary) {
  const std::string& unknown = read.text(model, "unk_token");
  const std::int64_t id = vocabulary.id_of_text(unknown);
  read.require(id >= 0, "the vocabulary lacks the unknown token {}", in_quotes(unknown));
  constexpr std::int64_t longest = 4096;  // the encoder takes quadratic time
  const std::int64_t most = JsonReader::member(model, "max_input_chars_per_word") == nullptr
                                ? 100
                                : read.number(model, "max_input_chars_per_word");
  read.require(most >= 0 && most <= longest, "max_input_chars_per_word is {}, expected at most {}", most, longest);
  return {read.text(model, "continuing_subword_prefix"), id, most};
}

BytePairOptions byte_pair_options(const JsonReader& read, const JsonValue& model) {
  return {.ignore_merges = read.flag(model, "ignore_merges", false),
          .prefix = text_or_empty(read, model, "continuing_subword_prefix"),
          .suffix = text_or_empty(read, model, "end_of_word_suffix"),
          .fuses_unknown = read.flag(model, "fuse_unk", false),
          .has_byte_tokens = read.flag(model, "byte_fallback", false)};
}

// tokenizer_config.json decides again whether a text gets a space in front.
void set_prefix_space(bool adds, TokenizerDescription& out) {
  using Kind = PreTokenizerStep::Kind;
  std::erase_if(out.pre_tokenizer,
                [&](const PreTokenizerStep& step) { return !adds && step.kind == Kind::leading_space; });
  std::erase_if(out.normalizer,
                [&](const NormalizerStep& step) { return !adds && step.kind == NormalizerStep::Kind::prepend; });
  for (PreTokenizerStep& step : out.pre_tokenizer) {
    if (step.kind == Kind::metaspace && adds != (step.prepend != PreTokenizerStep::Prepend::never)) {
      step.prepend = adds ? PreTokenizerStep::Prepend::first : PreTokenizerStep::Prepend::never;
    }
  }
}

/// Reads the special tokens that a post-processor places around a text.
class FrameReader {
 public:
  FrameReader(const JsonReader& read, TokenizerDescription& description) : read_(read), out_(description) {}

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
      if (const JsonValue* const sequence = JsonReader::member(part, "Sequence")) {
        read_.require(!has_text && read_.text(*sequence, "id") == "A", "expected one Sequence A in \"single\"");
        has_text = true;
        continue;
      }
      const JsonValue* const special = JsonReader::member(part, "SpecialToken");
      read_.require(special != nullptr, "expected a Sequence or SpecialToken in \"single\"");
      const std::string& name = read_.text(*special, "id");
      const JsonValue* const all = JsonReader::member(processor, "special_tokens");
      const JsonValue* const entry = all == nullptr ? nullptr : JsonReader::member(*all, name);
      read_.require(entry != nullptr, "\"special_tokens\" lack {}", in_quotes(name));
      for (const JsonValue& id : read_.list(*entry, "ids")) {
        read_.require(id.as<std::int64_t>() != nullptr, "expected whole numbers as \"ids\"");
        (has_text ? out_.after : out_.before).push_back(known(*id.as<std::int64_t>()));
      }
    }
    read_.require(has_text, "expected a Sequence in \"single\"");
  }

  const JsonReader& read_;
  TokenizerDescription& out_;
};

std::optional<std::string> token_setting(const JsonReader& read, const JsonValue& json, const std::string& name) {
  const JsonValue* const found = JsonReader::member(json, name);
  if (found == nullptr) {
    return std::nullopt;
  }
  // A text, or an added token.
  return found->as<std::string>() != nullptr ? *found->as<std::string>() : read.text(*found, "content");
}

}  // namespace

Merge merge_of(const Vocabulary& vocabulary, std::string_view pair, const std::string& what) {
  const auto [left, right] = parts_of(pair, what);
  return merge_of(vocabulary, left, right, what);
}

void add_tokens(const TokenizerSettings& settings, TokenizerDescription& description, const std::string& what) {
  const JsonReader read(what);
  VocabularyBuilder builder(read, false);
  for (Vocabulary::Entry& entry : description.vocabulary.entries()) {
    builder.add(std::move(entry));
  }
  for (AddedToken& token : description.added_tokens) {
    builder.add(std::move(token));
  }
  builder.add(settings);
  std::move(builder).finish(description);
}

void apply_frame(const TokenizerSettings& settings, TokenizerDescription& description) {
  if (!settings.adds_bos && !settings.adds_eos) {
    return;
  }
  const auto frame = [&](std::optional<bool> adds, const std::optional<std::string>& token) {
    const std::int64_t id = token ? description.vocabulary.id_of_text(*token) : -1;
    return adds.value_or(false) && id >= 0 ? std::vector{id} : std::vector<std::int64_t>();
  };
  description.before = frame(settings.adds_bos, settings.bos_token);
  description.after = frame(settings.adds_eos, settings.eos_token);
}

TokenizerDescription describe_tokenizer(const JsonValue& json, const TokenizerSettings& settings,
                                        const std::string& what) {
  const JsonReader read(what);
  const JsonValue* const model = JsonReader::member(json, "model");
  read.require(model != nullptr, "expected a \"model\"");
  TokenizerDescription result;
  const ModelType type = model_type_of(read, *model);
  if (const JsonValue* const normalizer = JsonReader::member(json, "normalizer")) {
    result.normalizer = normalizer_of(read, *normalizer);
  }
  PreTokenizerSteps pre_tokenizer;
  if (const JsonValue* const steps = JsonReader::member(json, "pre_tokenizer")) {
    pre_tokenizer = pre_tokenizer_of(read, *steps);
  }
  result.pre_tokenizer = std::move(pre_tokenizer.steps);
  bool of_bytes = false;
  if (type == ModelType::byte_pair) {
    result.byte_pair = byte_pair_options(read, *model);
    of_bytes = pre_tokenizer.is_byte_level && !result.byte_pair.has_byte_tokens && result.byte_pair.prefix.empty() &&
               result.byte_pair.suffix.empty();
    result.byte_pair.of_characters = !of_bytes;
  }
  if (const JsonValue* const decoder = JsonReader::member(json, "decoder")) {
    result.decoder = decoder_of(read, *decoder);
  } else if (!of_bytes) {
    result.decoder = {{.kind = DecoderStep::Kind::join}};
  }
  if (pre_tokenizer.is_byte_level && !of_bytes) {
    result.pre_tokenizer.push_back({.kind = PreTokenizerStep::Kind::byte_characters});
  }
  VocabularyBuilder builder(read, of_bytes);
  std::vector<double> scores;
  if (type == ModelType::unigram) {
    scores = read_scores(read, *model, builder);
  } else {
    builder.add(read.get<JsonValue::Object>(*model, "vocab", "an object"));
  }
  if (JsonReader::member(json, "added_tokens") != nullptr) {
    for (const JsonValue& entry : read.list(json, "added_tokens")) {
      builder.add(added_token(read, entry, read.number(entry, "id")));
    }
  }
  builder.add(settings);
  std::move(builder).finish(result);
  switch (type) {
    case ModelType::byte_pair: {
      const std::string unknown = text_or_empty(read, *model, "unk_token");
      if (const std::int64_t id = result.vocabulary.id_of_text(unknown); id >= 0) {
        result.byte_pair.unknown = id;
      }
      result.merges = merges_of(read, *model, result);
      break;
    }
    case ModelType::word_piece: result.word_piece = word_piece_of(read, *model, result.vocabulary); break;
    case ModelType::unigram: result.unigram = unigram_of(read, *model, result.vocabulary, std::move(scores)); break;
  }
  if (const JsonValue* const processor = JsonReader::member(json, "post_processor")) {
    read.for_each_part(*processor, "processors", FrameReader(read, result));
  }
  apply_frame(settings, result);
  if (settings.adds_prefix_space) {
    set_prefix_space(*settings.adds_prefix_space, result);
  }
  return result;
}

TokenizerDescription describe_tokenizer(const JsonValue& vocabulary, std::string_view merges,
                                        const TokenizerSettings& settings, const std::string& what) {
  const JsonReader read(what);
  const auto* const tokens = vocabulary.as<JsonValue::Object>();
  read.require(tokens != nullptr, "expected an object");
  const bool is_qwen = settings.tokenizer_class.starts_with("Qwen2Tokenizer");
  const bool is_gpt2 = settings.tokenizer_class.empty() || settings.tokenizer_class.starts_with("GPT2Tokenizer");
  read.require(
      is_qwen || is_gpt2,
      "without tokenizer.json, tokenizers of class {} are not supported, only GPT2Tokenizer and Qwen2Tokenizer",
      in_quotes(settings.tokenizer_class));

  TokenizerDescription result;
  VocabularyBuilder builder(read, true);
  builder.add(*tokens);
  // GPT-2's only special token is in its vocabulary.
  constexpr const char* end_of_text = "<|endoftext|>";
  if (const auto found = tokens->find(end_of_text); settings.added_tokens.empty() && found != tokens->end()) {
    const auto* const id = found->second.as<std::int64_t>();
    read.require(id != nullptr, "the id of {} is not a whole number", end_of_text);
    builder.add(AddedToken{.id = *id, .content = end_of_text, .normalized = false, .special = true});
  }
  builder.add(settings);
  std::move(builder).finish(result);
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
  if (is_qwen) {
    result.normalizer = {{.kind = NormalizerStep::Kind::form, .form = NormalForm::c}};
  }
  result.pre_tokenizer = {
      {.kind = PreTokenizerStep::Kind::pattern, .pattern = is_qwen ? Pattern::qwen : Pattern::gpt2}};
  apply_frame(settings, result);
  return result;
}

TokenizerSettings tokenizer_settings(const JsonValue& json, const std::string& what) {
  const JsonReader read(what);
  TokenizerSettings result;
  if (JsonReader::member(json, "tokenizer_class") != nullptr) {
    result.tokenizer_class = read.text(json, "tokenizer_class");
  }
  result.bos_token = token_setting(read, json, "bos_token");
  result.eos_token = token_setting(read, json, "eos_token");
  result.pad_token = token_setting(read, json, "pad_token");
  const auto add_special = [&](const JsonValue& token) {
    if (const auto* const text = token.as<std::string>()) {
      read.require(text->size() <= kLongestAddedToken, "a special token has {} bytes, expected at most {}",
                   text->size(), kLongestAddedToken);
      result.special_tokens.push_back({.content = *text, .normalized = false, .special = true});
    } else {
      AddedToken own = added_token(read, token, 0);
      own.special = true;
      result.special_tokens.push_back(std::move(own));
    }
  };
  for (const char* const name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    if (const JsonValue* const token = JsonReader::member(json, name)) {
      add_special(*token);
      result.named_tokens.emplace_back(name, result.special_tokens.back().content);
    }
  }
  for (const char* const name : {"additional_special_tokens", "extra_special_tokens"}) {
    const JsonValue* const list = JsonReader::member(json, name);
    if (list != nullptr && list->as<JsonValue::Array>() != nullptr) {
      for (const JsonValue& token : *list->as<JsonValue::Array>()) {
        add_special(token);
      }
    }
  }
  const auto flag = [&](const char* name) {
    return JsonReader::member(json, name) == nullptr ? std::nullopt : std::optional(read.flag(json, name, false));
  };
  result.adds_bos = flag("add_bos_token");
  result.adds_eos = flag("add_eos_token");
  result.adds_prefix_space = flag("add_prefix_space");
  result.is_legacy = flag("legacy");
  if (const JsonValue* const chat = JsonReader::member(json, "chat_template")) {
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
  if (JsonReader::member(json, "added_tokens_decoder") != nullptr) {
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
