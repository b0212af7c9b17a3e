#include <optional>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/chat.h>
#include <mica/io/families/detail/chat_writer.h>
#include <mica/io/families/detail/family.h>

namespace mica::io {

namespace {

detail::ChatParts parts(const detail::ChatWriter& writer, std::span<const ChatMessage> messages,
                        const ChatOptions& options) {
  check(!messages.empty(), "ChatFormat: expected at least one message");
  for (const ChatMessage& message : messages) {
    check(message.role == "system" || message.role == "user" || message.role == "assistant",
          "ChatFormat: expected the role system, user or assistant, got \"{}\"", message.role);
  }
  return writer.parts(messages, options);
}

std::int64_t special(const Tokenizer& tokenizer, const std::string& token) {
  const auto id = tokenizer.find(token);
  check(id.has_value(), "ChatFormat: the vocabulary lacks {}, which the chat template needs", token);
  return *id;
}

}  // namespace

ChatFormat::ChatFormat(std::string_view jinja) {
  check(!jinja.empty(), "ChatFormat: the tokenizer has no chat template; is this a model for chats?");
  detail::any_family([&](const auto& family) {
    for (const detail::ChatRecognizer recognized : family.chats) {
      if (std::optional<detail::ChatWriter> writer = recognized(jinja)) {
        writer_ = std::make_shared<const detail::ChatWriter>(*std::move(writer));
        return true;
      }
    }
    return false;
  });
  check(writer_ != nullptr,
        "ChatFormat: this chat template is not supported, only those of Llama 3, Qwen 2 to 3, SmolLM and Gemma 2");
}

std::string ChatFormat::text(std::span<const ChatMessage> messages, const ChatOptions& options) const {
  std::string text;
  for (const detail::ChatPart& part : parts(*writer_, messages, options)) {
    text += part.text;
  }
  return text;
}

std::vector<std::int64_t> ChatFormat::encode(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                             const ChatOptions& options) const {
  std::vector<std::int64_t> tokens;
  for (const detail::ChatPart& part : parts(*writer_, messages, options)) {
    if (part.is_special) {
      tokens.push_back(special(tokenizer, part.text));
      continue;
    }
    const std::vector<std::int64_t> words =
        tokenizer.encode(part.text, {.add_special_tokens = false, .parse_special_tokens = false});
    tokens.insert(tokens.end(), words.begin(), words.end());
  }
  return tokens;
}

std::int64_t ChatFormat::end_token(const Tokenizer& tokenizer) const { return special(tokenizer, writer_->end_token); }

}  // namespace mica::io
