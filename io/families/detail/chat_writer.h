#pragma once

// How a family's chat models write conversations: values that ModelFamily lists.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/chat.h>

namespace mica::io::detail {

/// A special token, or text between two.
struct ChatPart {
  std::string text;
  bool is_special;
};
using ChatParts = std::vector<ChatPart>;

struct ChatWriter {
  /// For at least one message; the roles are system, user or assistant. May throw for roles that the template refuses.
  std::function<ChatParts(std::span<const ChatMessage> messages, const ChatOptions& options)> parts;
  std::string end_token;  // ends an answer
};

/// The writer for a tokenizer's Jinja template; nullopt if it is not one of these.
using ChatRecognizer = std::optional<ChatWriter> (*)(std::string_view jinja);

/// Llama 3's; from 3.1 on, they put dates into the system message.
std::optional<ChatWriter> llama3_chat(std::string_view jinja);
/// ChatML, as Qwen 2 to 3 and SmolLM use it.
std::optional<ChatWriter> chatml_chat(std::string_view jinja);

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

/// A message's content as UTF-8, without space around it: like Python's str.strip().
std::string stripped_content(const ChatMessage& message);

}  // namespace mica::io::detail
