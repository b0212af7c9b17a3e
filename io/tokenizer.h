#pragma once

// Tokenizers of pretrained language models, from the files of a Hugging Face folder or a GGUF file: byte-level
// byte-pair encoding as GPT-2, Llama 3, Qwen 2 to 3 and SmolLM use it, and BERT's pieces of words.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mica::io {

namespace detail {
struct TokenizerParts;
}

struct EncodeOptions {
  bool add_special_tokens = true;    ///< those that the tokenizer places around a text, such as Llama 3's first token
  bool parse_special_tokens = true;  ///< "<|eot_id|>" in a text is that token; else it is text, as from a stranger
};

struct DecodeOptions {
  bool skip_special_tokens = true;
};

/// Gives the tokens of the Python package `tokenizers` for the same files (docs/tokenizers.md says where not).
///
/// Copies share their data. All members may be called from several threads at once.
class Tokenizer {
 public:
  /// Reads tokenizer.json, or vocab.json and merges.txt, of a folder, and tokenizer_config.json if it is there. The
  /// path may also be a file that ends in .gguf: see gguf_tokenizer() in io/gguf.h. Throws an Error that names the file
  /// and says what is wrong with it or not supported.
  static Tokenizer load(const std::filesystem::path& folder);
  /// Whether a folder has files for load(), or a GGUF file has a tokenizer, of whatever kind.
  static bool is_in(const std::filesystem::path& folder);
  /// Reads the text of a tokenizer.json, and of a tokenizer_config.json if it is not empty. Errors start with `what`.
  static Tokenizer parse(std::string_view tokenizer, std::string_view config, const std::string& what);

  /// The tokens of a text. Each invalid sequence of bytes counts as U+FFFD, as Python's errors="replace". At most 2³¹
  /// bytes. Takes time in proportion to the text; only for words of more than 48 bytes, n log n.
  std::vector<std::int64_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// The same for each text, on `threads` threads; 0: num_threads().
  std::vector<std::vector<std::int64_t>> encode_batch(std::span<const std::string> texts,
                                                      const EncodeOptions& options = {}, int threads = 0) const;

  /// The text of tokens, always valid UTF-8: bytes that are none become U+FFFD, such as a character of which a token is
  /// missing. Throws an Error for a number that is not a token.
  std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions& options = {}) const;
  /// The bytes of one token, which need not be complete characters.
  std::string_view token_bytes(std::int64_t token) const;

  /// The largest token plus one. A model's vocabulary may be larger; a GGUF file fills it with tokens without text.
  std::int64_t vocabulary_size() const;
  bool has_token(std::int64_t token) const;
  /// Of a token as tokenizer.json has it: "Ġthe", "<|eot_id|>".
  std::optional<std::int64_t> find(std::string_view token) const;
  bool is_special(std::int64_t token) const;
  /// Special tokens in the order of their numbers.
  std::vector<std::int64_t> special_tokens() const;

  /// By tokenizer_config.json, or by the GGUF file.
  std::optional<std::int64_t> bos_token() const;
  std::optional<std::int64_t> eos_token() const;
  std::optional<std::int64_t> pad_token() const;
  /// The tokens after which a model has nothing more to say, sorted: eos_token(), and what gguf_end_tokens() gives for
  /// a GGUF file. In a folder, generation_config.json may name others.
  std::vector<std::int64_t> end_tokens() const;
  /// The Jinja source of tokenizer_config.json or chat_template.jinja or of the GGUF file, or nothing. See io/chat.h.
  const std::string& chat_template() const;

 private:
  friend class StreamDecoder;
  friend struct detail::TokenizerParts;
  struct State;
  // Appends what a token adds to decoded text. `is_first` until there is one.
  void append_decoded(std::int64_t token, const DecodeOptions& options, bool& is_first, std::string& text) const;
  explicit Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};

/// Decodes tokens one by one, as they are generated. The returned parts are valid UTF-8: the first bytes of a character
/// are kept until the others are there.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, DecodeOptions options = {});

  /// The text that is complete with this token and was not before; often a word, sometimes nothing. A number
  /// without a token has no text: models may have more rows than their tokenizers have tokens, and can draw them.
  std::string push(std::int64_t token);
  /// What is left: U+FFFD for a character that remained incomplete, else nothing.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  DecodeOptions options_;
  std::string pending_;
  bool is_first_ = true;
};

}  // namespace mica::io
