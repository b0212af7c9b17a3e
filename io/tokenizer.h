#pragma once

// Tokenizers of pretrained language models, from the files of a Hugging Face folder or a GGUF file: byte-pair encoding
// of bytes (GPT-2, Llama 3, Qwen) or characters (Llama 2, Mistral, Gemma), Unigram (T5, XLM-R) and WordPiece (BERT).

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <mica/core/detail/shared_state.h>
#include <mica/io/detail/token_decoder.h>

namespace mica::io {

namespace detail {
struct TokenizerParts;
}

struct EncodeOptions {
  bool add_special_tokens = true;    ///< add those that the tokenizer puts around a text, such as Llama 3's first token
  bool parse_special_tokens = true;  ///< "<|eot_id|>" in a text is that token; false: plain text, if it is untrusted
  bool refuse_unknown = false;       ///< throw an Error for text that the vocabulary lacks; see encode()
  /// The largest number of tokens, special ones included: of a longer text, only the first are kept, as transformers'
  /// truncation does. 0: no limit. Throws an Error if it is below the number of tokens that are put around a text.
  std::int64_t max_length = 0;
};

struct DecodeOptions {
  bool skip_special_tokens = true;
};

/// Gives the same tokens as the Python package `tokenizers` with the same files (docs/tokenizers.md lists the
/// exceptions).
///
/// Copies share their data. All members may be called from several threads at once.
class Tokenizer {
 public:
  /// Reads tokenizer.json, or vocab.json and merges.txt, or the SentencePiece model tokenizer.model or spiece.model, of
  /// a folder, and tokenizer_config.json if it exists. The path may also be a .gguf file: see gguf_tokenizer() in
  /// io/gguf_tokenizer.h. Throws an Error that names the file and says what is wrong or not supported.
  static Tokenizer load(const std::filesystem::path& folder);
  /// Whether a folder has the files of a tokenizer, or a GGUF file contains one, supported or not.
  static bool is_in(const std::filesystem::path& folder);
  /// Reads the text of a tokenizer.json, and of a tokenizer_config.json if it is not empty. Errors start with `what`.
  static Tokenizer parse(std::string_view tokenizer, std::string_view config, const std::string& what);

  /// The tokens of a text of at most 2³¹ bytes. Invalid UTF-8 is replaced by U+FFFD, as with Python's errors="replace".
  /// Bytes or characters that the vocabulary lacks become the unknown token if there is one, and are dropped otherwise.
  /// Takes linear time; n log n in the length of words of more than 48 bytes.
  std::vector<std::int64_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// encode() for each text, on `threads` threads; 0: num_threads().
  std::vector<std::vector<std::int64_t>> encode_batch(std::span<const std::string> texts,
                                                      const EncodeOptions& options = {}, int threads = 0) const;

  /// The text of tokens, always valid UTF-8: invalid bytes, such as an incomplete character, become U+FFFD. Throws an
  /// Error for a number that is not a token.
  std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions& options = {}) const;
  /// The bytes of one token, which need not be complete characters. Valid as long as this object or a copy of it.
  std::string_view token_bytes(std::int64_t token) const&;
  std::string_view token_bytes(std::int64_t token) const&& = delete;

  /// The largest token plus one. A model's vocabulary may be larger; GGUF files pad it with unused tokens.
  std::int64_t vocabulary_size() const;
  bool has_token(std::int64_t token) const;
  /// The number of a token, written as in tokenizer.json ("Ġthe", "<|eot_id|>"); nullopt if there is none.
  std::optional<std::int64_t> find(std::string_view token) const;
  bool is_special(std::int64_t token) const;
  /// Special tokens in the order of their numbers.
  std::vector<std::int64_t> special_tokens() const;

  /// As named in tokenizer_config.json or the GGUF file.
  std::optional<std::int64_t> bos_token() const;
  std::optional<std::int64_t> eos_token() const;
  std::optional<std::int64_t> pad_token() const;
  /// The tokens that end a generated text, sorted: eos_token() and, for a GGUF file, gguf_end_tokens(). For a folder,
  /// generation_config.json may name more, which are not included.
  std::vector<std::int64_t> end_tokens() const;
  /// The Jinja source of the chat template, from tokenizer_config.json, chat_template.jinja or the GGUF file; empty if
  /// there is none. See io/chat.h.
  const std::string& chat_template() const;

 private:
  friend class StreamDecoder;
  friend struct detail::TokenizerParts;
  struct State;
  void append_decoded(std::int64_t token, const DecodeOptions& options, detail::TokenDecoder& decoder,
                      std::string& text) const;
  explicit Tokenizer(std::shared_ptr<const State> state) : state_("Tokenizer", std::move(state)) {}

  mica::detail::SharedState<const State> state_;
};

/// Decodes tokens one by one, as they are generated. The returned parts are valid UTF-8: the first bytes of a character
/// are held back until the others arrive.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, DecodeOptions options = {});

  /// The text that this token completes; often a word, sometimes nothing. A number that is not a token has no text: a
  /// model may have more rows than its tokenizer has tokens, and may draw one of them.
  std::string push(std::int64_t token);
  /// U+FFFD if the last character remained incomplete, else nothing.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  DecodeOptions options_;
  detail::TokenDecoder decoder_;
  std::string pending_;
};

}  // namespace mica::io
