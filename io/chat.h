#pragma once

// Formats conversations as text for chat models.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/tokenizer.h>

namespace mica::io {

namespace detail {
struct ChatWriter;
}

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = true;  ///< end with the beginning of an answer
  bool thinking = true;               ///< false: ask Qwen 3 to answer without thinking
  std::string date = "26 Jul 2024";  ///< in the system message of Llama 3.1 and later; this is their templates' default
};

/// One of the chat formats that mica knows, chosen by a tokenizer's Jinja template: templates are recognized, not
/// executed.
///
/// - Llama 3: "<|start_header_id|>user<|end_header_id|>\n\n…<|eot_id|>", from 3.1 on with dates in the system message.
/// - ChatML, as Qwen 2 to 3 and SmolLM use it: "<|im_start|>user\n…<|im_end|>\n", with the template's system message if
///   the conversation has none. Qwen 3's thoughts are removed from earlier answers.
/// - Gemma 2: "<start_of_turn>user\n…<end_of_turn>\n", without a system message, user and assistant in turn.
class ChatFormat {
 public:
  /// Throws an Error if the template is empty or unknown.
  explicit ChatFormat(std::string_view jinja);

  /// The conversation as text, from its first special token on: encode it without adding special tokens. Throws an
  /// Error for roles that the template does not have.
  std::string text(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;
  /// The tokens of text(). Special tokens in the contents of messages are encoded as plain text, so that a message
  /// cannot end itself or start another.
  std::vector<std::int64_t> encode(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                   const ChatOptions& options = {}) const;
  /// The token that ends an answer.
  std::int64_t end_token(const Tokenizer& tokenizer) const;

 private:
  std::shared_ptr<const detail::ChatWriter> writer_;
};

}  // namespace mica::io
