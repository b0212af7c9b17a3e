#pragma once

// Formats conversations as text for chat models.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <mica/io/detail/jinja.h>
#include <mica/io/tokenizer.h>

namespace mica::io {

struct ChatMessage {
  std::string role;  ///< such as "system", "user", "assistant" or "tool"
  std::string content;
  /// More members of the message as a JSON object, such as {"tool_calls": [{"function": {"name": …, "arguments":
  /// {…}}}]} or
  /// {"reasoning_content": …}; empty: none.
  std::string others{};
};

struct ChatOptions {
  bool add_generation_prompt = true;  ///< end with the beginning of an answer
  bool thinking = true;               ///< false: ask models such as Qwen 3 to answer without thinking (enable_thinking)
  std::string date{};   ///< "26 Jul 2024", for templates that insert it (date_string); empty: as the template does
  std::string tools{};  ///< the functions that the model may call, a JSON list as transformers takes it; empty: none
  std::string variables{};  ///< more variables of the template, a JSON object; empty: none
  /// The time for templates that insert the current one, in seconds since 1970; −1: now.
  std::int64_t time = -1;
};

/// A tokenizer's chat template: a program in the language Jinja, which renders conversations as the package
/// transformers does. docs/tokenizers.md lists what mica knows of the language. A template can do nothing but compute a
/// text, within bounds of time and memory.
class ChatFormat {
 public:
  /// Throws an Error if the tokenizer has no chat template, and for one that is not valid or not supported.
  explicit ChatFormat(Tokenizer tokenizer);

  /// The conversation as text, from its first special token on: encode it without adding special tokens. Throws an
  /// Error for what the template refuses, for others, tools or variables that are not JSON, and without messages.
  std::string text(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;
  /// The tokens of text(). Special tokens in messages and tools are encoded as plain text, so that a message cannot end
  /// itself or start another.
  std::vector<std::int64_t> encode(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;
  /// The token that ends an answer: the first special token behind one; the tokenizer's eos_token() if there is none or
  /// the template refuses. Throws an Error without either.
  std::int64_t end_token() const;

 private:
  Tokenizer tokenizer_;
  detail::jinja::Template template_;
};

}  // namespace mica::io
