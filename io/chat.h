#pragma once

// Formats conversations as text for chat models.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/tokenizer.h>

namespace mica::io {

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
class ChatFormat {
 public:
  /// Throws an Error if the template is empty or unknown.
  explicit ChatFormat(std::string_view jinja);

  /// The conversation as text, from its first special token on: encode it without adding special tokens. Throws an
  /// Error for other roles.
  std::string text(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;
  /// The tokens of text(). Special tokens in the contents of messages are encoded as plain text, so that a message
  /// cannot end itself or start another.
  std::vector<std::int64_t> encode(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                   const ChatOptions& options = {}) const;
  /// The token that ends an answer.
  std::int64_t end_token(const Tokenizer& tokenizer) const;

 private:
  enum class Family { llama3, chatml };
  /// A special token, or text between two.
  struct Part {
    std::string text;
    bool is_special;
  };
  std::vector<Part> parts(std::span<const ChatMessage> messages, const ChatOptions& options) const;
  std::vector<Part> llama3_parts(std::span<const ChatMessage> messages, const ChatOptions& options) const;
  std::vector<Part> chatml_parts(std::span<const ChatMessage> messages, const ChatOptions& options) const;
  /// The content of an answer as Qwen 3's template writes it, with or without its thoughts. `is_last`: it is the last
  /// message.
  static std::string answer(std::string_view content, bool keeps_thoughts, bool is_last);
  std::int64_t special(const Tokenizer& tokenizer, const std::string& token) const;

  Family family_ = Family::chatml;
  bool has_dates_ = false;      // Llama 3.1 and later
  bool has_thoughts_ = false;   // Qwen 3
  bool always_thinks_ = false;  // Qwen 3's models that always think
  std::string default_system_;  // of ChatML
};

}  // namespace mica::io
