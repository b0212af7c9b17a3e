#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <unordered_map>

#include <mica/core/check.h>
#include <mica/core/parallel.h>
#include <mica/core/progress.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/sentence_piece.h>
#include <mica/io/detail/tokenizer_file.h>
#include <mica/io/detail/tokenizer_parts.h>
#include <mica/io/detail/word_cache.h>
#include <mica/io/file.h>
#include <mica/io/gguf_tokenizer.h>
#include <mica/io/text.h>
#include <mica/io/tokenizer.h>

namespace mica::io {

namespace {

constexpr std::uint64_t kLargestFile = std::uint64_t{64} << 20;
constexpr std::size_t kLongestText = std::size_t{1} << 31;  // positions in words have 32 bits

constexpr std::size_t kReportedText = std::size_t{1} << 20;  // bytes; worth a progress report
constexpr std::size_t kNormalizedPiece = std::size_t{1} << 18;

constexpr std::size_t kLeastUnigramPart = std::size_t{1} << 18;

/// Reports progress in bytes, but not after each word, which would be slow.
class Meter {
 public:
  explicit Meter(ProgressTask* task) : task_(task) {}

  void add(std::size_t bytes) {
    constexpr std::int64_t kReported = 1 << 16;
    done_ += static_cast<std::int64_t>(bytes);
    if (done_ - reported_ >= kReported) {
      report();
    }
  }
  /// Reports the rest at the end of a text of `bytes` bytes, since normalization may have changed its length.
  void finish(std::size_t bytes) {
    done_ = static_cast<std::int64_t>(bytes);
    report();
  }

 private:
  void report() {
    if (task_ != nullptr) {
      task_->advance(done_ - reported_);
    }
    reported_ = done_;
  }

  ProgressTask* task_;
  std::int64_t done_ = 0, reported_ = 0;
};

/// A thread's memory while it encodes.
struct Scratch {
  detail::WordCache words;
  detail::BytePairScratch pairs;
  detail::UnigramScratch unigram;
};

constexpr std::string_view kSpaceMark = "\u2581";  // stands for a space in SentencePiece's tokens

}  // namespace

struct Tokenizer::State {
  State(detail::TokenizerDescription description, detail::TokenizerSettings own_settings, const std::string& what);

  std::optional<std::int64_t> id_of(const std::optional<std::string>& token) const {
    const std::int64_t id = token ? vocabulary.id_of_text(*token) : -1;
    return id < 0 ? std::nullopt : std::optional(id);
  }

  // As the package `tokenizers`, decodes added tokens to the text that is searched for.
  const std::string& shown_text(std::int64_t token) const {
    const auto own = added.find(token);
    return own != added.end() ? own->second.content : vocabulary[token].text;
  }

  // `progress` may be null.
  std::vector<std::int64_t> encode(std::string_view text, const EncodeOptions& options, Scratch& scratch,
                                   ProgressTask* progress) const;
  // The normalized text: stored in `normalized`, or `text` itself if it does not change.
  std::string_view normalized(std::string_view text, std::string& normalized) const;
  std::string normalized_in_parts(std::string_view text, std::size_t first, std::size_t last) const;
  // `is_first`: the part begins the text.
  void encode_words(std::string_view text, bool is_first, const EncodeOptions& options, Scratch& scratch, Meter& meter,
                    std::vector<std::int64_t>& out) const;
  void encode_part(std::string_view part, bool is_first, const EncodeOptions& options, Scratch& scratch, Meter& meter,
                   std::vector<std::int64_t>& out) const;
  // Appends the tokens of a word. Returns whether the vocabulary has all of it.
  bool encode_word(std::string_view word, Scratch& scratch, std::vector<std::int64_t>& out) const;
  void find_cuts();
  template <class Sink>
  void cut(std::string_view text, const Sink& sink) const;

  // Takes scratch memory that no thread is using.
  std::unique_ptr<Scratch> borrow() const {
    const std::lock_guard lock(mutex);
    if (idle.empty()) {
      return std::make_unique<Scratch>();
    }
    auto scratch = std::move(idle.back());
    idle.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<Scratch> scratch) const {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(scratch));
  }

  detail::Vocabulary vocabulary;
  detail::BytePairEncoder encoder;
  std::optional<detail::WordPieceEncoder> word_piece;  // instead of byte-pair encoding
  std::optional<detail::UnigramEncoder> unigram;       // or this one
  detail::Normalizer normalizer;
  detail::PreTokenizer pre_tokenizer;
  detail::Decoder decoder;
  bool joins_bytes;                     // the decoder only joins the tokens' bytes
  std::vector<std::string> own_bytes;   // of each token, unless joins_bytes
  bool cuts = false;                    // a text without spaces may be cut before kSpaceMark
  std::set<char32_t> joined_to_spaces;  // but not after these characters, which are before one in a token
  std::vector<std::int64_t> before, after;
  std::unordered_map<std::int64_t, detail::AddedToken> added;
  detail::AddedTokenFinder in_text, in_normalized_text;
  detail::TokenizerSettings settings;

  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Scratch>> idle;
};

Tokenizer::State::State(detail::TokenizerDescription description, detail::TokenizerSettings own_settings,
                        const std::string& what)
    : vocabulary(std::move(description.vocabulary)),
      encoder(vocabulary, description.merges, description.byte_pair, what),
      word_piece(std::move(description.word_piece)),
      unigram(std::move(description.unigram)),
      normalizer(std::move(description.normalizer)),
      pre_tokenizer(std::move(description.pre_tokenizer)),
      decoder(std::move(description.decoder)),
      joins_bytes(decoder.size() == 1 && decoder[0].kind == detail::DecoderStep::Kind::byte_level && !word_piece &&
                  !unigram && !description.byte_pair.of_characters),
      before(std::move(description.before)),
      after(std::move(description.after)),
      settings(std::move(own_settings)) {
  std::vector<detail::AddedToken> raw, changed_with_text;
  for (detail::AddedToken& token : description.added_tokens) {
    if (token.normalized && !token.is_normalized) {
      std::string changed;
      token.content = std::string(this->normalized(token.content, changed));
    }
    (token.normalized ? changed_with_text : raw).push_back(token);
    added.emplace(token.id, std::move(token));
  }
  in_text = detail::AddedTokenFinder(std::move(raw));
  in_normalized_text = detail::AddedTokenFinder(std::move(changed_with_text));
  if (!joins_bytes) {
    for (std::int64_t id = 0; id < vocabulary.size(); ++id) {
      own_bytes.push_back(vocabulary.has(id) ? detail::bytes_of_token(decoder, shown_text(id)) : "");
    }
  }
  find_cuts();
}

// SentencePiece's models encode a text without cutting it into words. Parts of it can be encoded separately where no
// token has the characters on both sides: usually before each space, which makes words that repeat.
void Tokenizer::State::find_cuts() {
  const detail::BytePairOptions& options = encoder.options();
  const bool is_plain = unigram || (!word_piece && options.of_characters && !options.ignore_merges &&
                                    options.prefix.empty() && options.suffix.empty());
  if (!is_plain || vocabulary.id_of_bytes(kSpaceMark) < 0) {
    return;
  }
  cuts = true;
  for (std::int64_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary[id].bytes;
    for (std::size_t at = text.find(kSpaceMark, 1); at != std::string_view::npos; at = text.find(kSpaceMark, at + 1)) {
      joined_to_spaces.insert(detail::character_at(text.data() + detail::character_before(text, at)).code);
    }
  }
}

template <class Sink>
void Tokenizer::State::cut(std::string_view text, const Sink& sink) const {
  // Sums of a unigram model's scores would be rounded differently, so only huge texts are cut, to bound the memory.
  const std::size_t least = unigram ? kLeastUnigramPart : 0;
  std::size_t begin = 0;
  for (std::size_t at = text.find(kSpaceMark, 1); at != std::string_view::npos; at = text.find(kSpaceMark, at + 1)) {
    const char32_t before = detail::character_at(text.data() + detail::character_before(text, at)).code;
    if (at - begin >= least && !joined_to_spaces.contains(before)) {
      sink(text.substr(begin, at - begin));
      begin = at;
    }
  }
  sink(text.substr(begin));
}

bool Tokenizer::State::encode_word(std::string_view word, Scratch& scratch, std::vector<std::int64_t>& out) const {
  return word_piece ? word_piece->encode(word, vocabulary, out)
         : unigram  ? unigram->encode(word, vocabulary, scratch.unigram, out)
                    : encoder.encode(word, vocabulary, scratch.pairs, out);
}

std::vector<std::int64_t> Tokenizer::State::encode(std::string_view text, const EncodeOptions& options,
                                                   Scratch& scratch, ProgressTask* progress) const {
  check(text.size() <= kLongestText, "encode: the text has {} bytes, expected at most {}", text.size(), kLongestText);
  Meter meter(progress);
  const std::size_t bytes = text.size();
  std::string repaired;
  if (detail::valid_utf8_length(text) != text.size()) {
    repaired = detail::repaired_utf8(text);
    text = repaired;
  }
  std::vector<std::int64_t> out;
  out.reserve(text.size() / 4 + before.size() + after.size());
  if (options.add_special_tokens) {
    out = before;
  }
  in_text.split(
      text, options.parse_special_tokens,
      [&](std::string_view part) { encode_part(part, part.data() == text.data(), options, scratch, meter, out); },
      [&](std::int64_t token) { out.push_back(token); });
  if (options.max_length != 0) {
    const std::size_t around = options.add_special_tokens ? before.size() + after.size() : 0;
    check(options.max_length > 0 && static_cast<std::size_t>(options.max_length) >= around,
          "encode: expected a max_length of at least {}, the tokens around a text, or 0, got {}", around,
          options.max_length);
    const std::size_t most =
        static_cast<std::size_t>(options.max_length) - (options.add_special_tokens ? after.size() : 0);
    out.resize(std::min(out.size(), most));
  }
  if (options.add_special_tokens) {
    out.insert(out.end(), after.begin(), after.end());
  }
  meter.finish(bytes);
  return out;
}

void Tokenizer::State::encode_part(std::string_view part, bool is_first, const EncodeOptions& options, Scratch& scratch,
                                   Meter& meter, std::vector<std::int64_t>& out) const {
  std::string changed;
  const std::string_view whole = normalized(part, changed);
  in_normalized_text.split(
      whole, options.parse_special_tokens,
      [&](std::string_view text) {
        encode_words(text, is_first && text.data() == whole.data(), options, scratch, meter, out);
      },
      [&](std::int64_t token) { out.push_back(token); });
}

std::string_view Tokenizer::State::normalized(std::string_view text, std::string& normalized) const {
  for (std::size_t step = 0; step < normalizer.size();) {
    std::size_t last = step;
    while (last < normalizer.size() && detail::works_in_parts(normalizer[last])) {
      ++last;
    }
    if (last > step + 1 || (last == step + 1 && detail::may_change(text, normalizer[step]))) {
      normalized = normalized_in_parts(text, step, last);
      text = normalized;
    } else if (last == step) {
      last = step + 1;
      if (detail::may_change(text, normalizer[step])) {
        normalized = detail::normalized(text, normalizer[step]);
        text = normalized;
      }
    }
    step = last;
  }
  return text;
}

// In pieces that begin with an ASCII character, across which characters never combine.
std::string Tokenizer::State::normalized_in_parts(std::string_view text, std::size_t first, std::size_t last) const {
  std::optional<ProgressTask> progress;
  if (text.size() >= kReportedText) {
    progress.emplace("normalizing", static_cast<std::int64_t>(text.size()));
  }
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    std::size_t size = std::min(kNormalizedPiece, text.size());
    while (size < text.size() && static_cast<unsigned char>(text[size]) >= 0x80) {
      ++size;
    }
    std::string piece(text.substr(0, size));
    for (std::size_t step = first; step < last; ++step) {
      piece = detail::normalized(piece, normalizer[step]);
    }
    result += piece;
    text.remove_prefix(size);
    if (progress) {
      progress->advance(static_cast<std::int64_t>(size));
    }
  }
  return result;
}

void Tokenizer::State::encode_words(std::string_view text, bool is_first, const EncodeOptions& options,
                                    Scratch& scratch, Meter& meter, std::vector<std::int64_t>& out) const {
  const auto encode = [&](std::string_view word) {
    scratch.words.append(word, out, [&] {
      const bool is_known = encode_word(word, scratch, out);
      check(is_known || !options.refuse_unknown, "encode: the vocabulary lacks a part of \"{}\"", word);
      return is_known;  // so that the check is made again
    });
    meter.add(word.size());
  };
  detail::pre_tokenize(pre_tokenizer, text, is_first, [&](std::string_view word) {
    if (cuts) {
      cut(word, encode);
    } else {
      encode(word);
    }
  });
}

namespace detail {

Tokenizer TokenizerParts::tokenizer(TokenizerDescription description, TokenizerSettings settings,
                                    const std::string& what) {
  return Tokenizer(std::make_shared<Tokenizer::State>(std::move(description), std::move(settings), what));
}

TokenizerDescription TokenizerParts::description(const Tokenizer& tokenizer) {
  const Tokenizer::State& state = *tokenizer.state_;
  TokenizerDescription result;
  result.vocabulary = Vocabulary(state.vocabulary.entries(), "tokenizer");
  result.word_piece = state.word_piece;
  result.unigram = state.unigram;
  result.merges = state.encoder.merges();
  result.byte_pair = state.encoder.options();
  result.normalizer = state.normalizer;
  result.pre_tokenizer = state.pre_tokenizer;
  result.decoder = state.decoder;
  for (const auto& [id, token] : state.added) {
    result.added_tokens.push_back(token);
    result.added_tokens.back().content = state.vocabulary[id].text;  // the content before normalization
  }
  result.before = state.before;
  result.after = state.after;
  return result;
}

const TokenizerSettings& TokenizerParts::settings(const Tokenizer& tokenizer) { return tokenizer.state_->settings; }

const std::string& TokenizerParts::text(const Tokenizer& tokenizer, std::int64_t token) {
  return tokenizer.state_->vocabulary[token].text;
}

std::vector<std::int64_t> TokenizerParts::encode_marked(const Tokenizer& tokenizer, std::string_view text,
                                                        std::string_view mark) {
  const Tokenizer::State& state = *tokenizer.state_;
  std::vector<AddedToken> specials;
  for (const std::int64_t id : tokenizer.special_tokens()) {
    specials.push_back(state.added.at(id));
    specials.back().content = state.vocabulary[id].text;
  }
  auto scratch = state.borrow();
  Meter meter(nullptr);
  std::vector<std::int64_t> out;
  AddedTokenFinder(std::move(specials))
      .split(
          text, true,
          [&](std::string_view part) {
            const bool is_first = part.data() == text.data();
            std::string own;
            for (std::size_t at = part.find(mark); at != std::string_view::npos; at = part.find(mark)) {
              own += part.substr(0, at);
              part.remove_prefix(at + mark.size());
            }
            own += part;
            const EncodeOptions plain{.add_special_tokens = false, .parse_special_tokens = false};
            state.in_text.split(
                own, false,
                [&](std::string_view words) {
                  state.encode_part(words, is_first && words.data() == own.data(), plain, *scratch, meter, out);
                },
                [&](std::int64_t token) { out.push_back(token); });
          },
          [&](std::int64_t token) { out.push_back(token); });
  state.give_back(std::move(scratch));
  return out;
}

}  // namespace detail

namespace {

// The SentencePiece file of a folder, if it has one.
std::optional<std::filesystem::path> sentence_piece_file(const std::filesystem::path& folder) {
  for (const char* const name : {"tokenizer.model", "spiece.model"}) {
    if (is_there(folder / name)) {
      return folder / name;
    }
  }
  return std::nullopt;
}

}  // namespace

bool Tokenizer::is_in(const std::filesystem::path& folder) {
  if (detail::is_gguf(folder)) {
    return has_gguf_tokenizer(load_gguf_metadata(folder));
  }
  return is_there(folder / "tokenizer.json") || (is_there(folder / "vocab.json") && is_there(folder / "merges.txt")) ||
         sentence_piece_file(folder).has_value();
}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  if (detail::is_gguf(folder)) {
    return gguf_tokenizer(load_gguf_metadata(folder), "load: " + folder.string());
  }
  check_folder(folder, "load");
  detail::TokenizerSettings settings;
  if (const auto path = folder / "tokenizer_config.json"; is_there(path)) {
    settings = detail::tokenizer_settings(read_json(path, kLargestFile), "load: " + path.string());
  }
  const auto checked_text = [](const std::filesystem::path& path) {
    const std::uint64_t size = InputFile(path).size();
    check(size <= kLargestFile, "load: {} has {} bytes, expected at most {}", path.string(), size, kLargestFile);
    return read_text(path);
  };
  if (const auto path = folder / "chat_template.jinja"; is_there(path)) {
    settings.chat_template = checked_text(path);
  }
  const auto path = folder / "tokenizer.json", vocabulary_path = folder / "vocab.json";
  check(is_in(folder), "load: {} has no tokenizer: no tokenizer.json, vocab.json with merges.txt, or tokenizer.model",
        folder.string());
  std::string what = "load: " + path.string();
  detail::TokenizerDescription description;
  if (is_there(path)) {
    description = detail::describe_tokenizer(read_json(path, kLargestFile), settings, what);
  } else if (is_there(vocabulary_path) && is_there(folder / "merges.txt")) {
    what = "load: " + vocabulary_path.string();
    description = detail::describe_tokenizer(read_json(vocabulary_path, kLargestFile),
                                             checked_text(folder / "merges.txt"), settings, what);
  } else {
    const std::filesystem::path model = *sentence_piece_file(folder);
    what = "load: " + model.string();
    description = detail::describe_sentence_piece_file(checked_text(model), settings, what);
  }
  return detail::TokenizerParts::tokenizer(std::move(description), std::move(settings), what);
}

Tokenizer Tokenizer::parse(std::string_view tokenizer, std::string_view config, const std::string& what) {
  detail::TokenizerSettings settings;
  if (!config.empty()) {
    settings = detail::tokenizer_settings(parse_json(config, what), what);
  }
  detail::TokenizerDescription description = detail::describe_tokenizer(parse_json(tokenizer, what), settings, what);
  return detail::TokenizerParts::tokenizer(std::move(description), std::move(settings), what);
}

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  auto scratch = state_->borrow();
  std::optional<ProgressTask> progress;
  if (text.size() >= kReportedText) {
    progress.emplace("tokenizing", static_cast<std::int64_t>(text.size()));
  }
  std::vector<std::int64_t> tokens = state_->encode(text, options, *scratch, progress ? &*progress : nullptr);
  state_->give_back(std::move(scratch));
  return tokens;
}

std::vector<std::vector<std::int64_t>> Tokenizer::encode_batch(std::span<const std::string> texts,
                                                               const EncodeOptions& options, int threads) const {
  check(threads >= 0 && threads <= kMaxThreads, "encode_batch: expected threads in [0, {}], got {}", kMaxThreads,
        threads);
  std::vector<std::vector<std::int64_t>> tokens(texts.size());
  std::int64_t bytes = 0;
  for (const std::string& text : texts) {
    bytes += static_cast<std::int64_t>(text.size());
  }
  ProgressTask progress("tokenizing", bytes);
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      auto scratch = state_->borrow();
      for (std::size_t i = next++; i < texts.size(); i = next++) {
        tokens[i] = state_->encode(texts[i], options, *scratch, &progress);
      }
      state_->give_back(std::move(scratch));
    } catch (...) {
      next = texts.size();  // makes the other threads stop
      const std::lock_guard lock(mutex);
      error = std::current_exception();
    }
  };
  const auto count = std::min(static_cast<std::size_t>(threads == 0 ? num_threads() : threads), texts.size());
  {
    std::vector<std::thread> workers;
    workers.reserve(count);
    try {
      for (std::size_t i = 1; i < count; ++i) {
        workers.emplace_back(work);
      }
    } catch (const std::system_error&) {  // no more threads: those that started do the work
    }
    work();
    for (std::thread& worker : workers) {
      worker.join();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return tokens;
}

std::string Tokenizer::decode(std::span<const std::int64_t> tokens, const DecodeOptions& options) const {
  std::string text;
  detail::TokenDecoder decoder(state_->decoder);
  for (const std::int64_t token : tokens) {
    append_decoded(token, options, decoder, text);
  }
  decoder.finish(text);
  return detail::valid_utf8_length(text) == text.size() ? text : detail::repaired_utf8(text);
}

void Tokenizer::append_decoded(std::int64_t token, const DecodeOptions& options, detail::TokenDecoder& decoder,
                               std::string& text) const {
  const std::string_view bytes = token_bytes(token);
  if (options.skip_special_tokens && is_special(token)) {
    return;
  }
  if (state_->joins_bytes) {
    text += bytes;
  } else {
    decoder.push(state_->shown_text(token), text);
  }
}

std::string_view Tokenizer::token_bytes(std::int64_t token) const& {
  check(has_token(token), "decode: {} is not a token of this vocabulary, which ends at {}", token,
        vocabulary_size() - 1);
  if (!state_->joins_bytes) {
    return state_->own_bytes[static_cast<std::size_t>(token)];
  }
  const auto added = state_->added.find(token);
  return added != state_->added.end() ? added->second.content : state_->vocabulary[token].bytes;
}

std::int64_t Tokenizer::vocabulary_size() const { return state_->vocabulary.size(); }
bool Tokenizer::has_token(std::int64_t token) const { return state_->vocabulary.has(token); }
std::optional<std::int64_t> Tokenizer::find(std::string_view token) const { return state_->id_of(std::string(token)); }
bool Tokenizer::is_special(std::int64_t token) const {
  const auto added = state_->added.find(token);
  return added != state_->added.end() && added->second.special;
}
std::vector<std::int64_t> Tokenizer::special_tokens() const {
  std::vector<std::int64_t> tokens;
  for (const auto& [id, token] : state_->added) {
    if (token.special) {
      tokens.push_back(id);
    }
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

std::optional<std::int64_t> Tokenizer::bos_token() const { return state_->id_of(state_->settings.bos_token); }
std::optional<std::int64_t> Tokenizer::eos_token() const { return state_->id_of(state_->settings.eos_token); }
std::optional<std::int64_t> Tokenizer::pad_token() const { return state_->id_of(state_->settings.pad_token); }
std::vector<std::int64_t> Tokenizer::end_tokens() const {
  std::vector<std::int64_t> tokens = state_->settings.end_tokens;
  if (const auto eos = eos_token(); eos && std::find(tokens.begin(), tokens.end(), *eos) == tokens.end()) {
    tokens.insert(std::upper_bound(tokens.begin(), tokens.end(), *eos), *eos);
  }
  return tokens;
}
const std::string& Tokenizer::chat_template() const { return state_->settings.chat_template; }

StreamDecoder::StreamDecoder(Tokenizer tokenizer, DecodeOptions options)
    : tokenizer_(std::move(tokenizer)), options_(options), decoder_(tokenizer_.state_->decoder) {}

std::string StreamDecoder::push(std::int64_t token) {
  if (!tokenizer_.has_token(token)) {
    return "";
  }
  tokenizer_.append_decoded(token, options_, decoder_, pending_);
  const std::size_t complete = detail::complete_utf8_length(pending_);
  const std::string text = detail::repaired_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string StreamDecoder::finish() {
  decoder_.finish(pending_);
  const std::string text = detail::repaired_utf8(pending_);
  pending_.clear();
  decoder_ = detail::TokenDecoder(tokenizer_.state_->decoder);
  return text;
}

}  // namespace mica::io
