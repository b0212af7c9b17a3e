#include <algorithm>
#include <utility>

#include <mica/io/families/detail/chat_writer.h>

namespace mica::io::detail {

namespace {

constexpr std::string_view kThinkBegin = "<think>", kThinkEnd = "</think>";

struct ChatMl {
  bool has_thoughts;           // Qwen 3: thoughts are removed from earlier answers
  bool always_thinks;          // Qwen 3's models that always think
  std::string default_system;  // the system message of a conversation without one
};

std::string_view without_newlines_before(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}
std::string_view without_newlines_after(std::string_view text) {
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

// The text between "<|im_start|>system\n" and "<|im_end|>" in a string of the template. There, \n is two characters.
std::string default_system_of(std::string_view jinja) {
  constexpr std::string_view begin = "<|im_start|>system", end = "<|im_end|>", newline = "\\n";
  // The next end and the next character that no text has, at or after `from`. Searched for only once each, so that the
  // time is linear.
  std::size_t next_end = 0, next_other = 0;
  for (std::size_t at = jinja.find(begin); at != std::string_view::npos; at = jinja.find(begin, at + 1)) {
    std::size_t from = at + begin.size();
    if (jinja.substr(from).starts_with(newline)) {
      from += newline.size();
    } else if (jinja.substr(from).starts_with('\n')) {
      ++from;
    } else {
      continue;
    }
    if (next_end <= from) {
      next_end = jinja.find(end, from);
    }
    if (next_other <= from) {
      next_other = std::min(jinja.find_first_of("'\"{}\\", from), jinja.size());
    }
    if (next_end == std::string_view::npos) {
      return {};
    }
    if (next_end > from && next_end < next_other) {
      return std::string(jinja.substr(from, next_end - from));
    }
  }
  return {};
}

// The content of an answer as Qwen 3's template writes it, with or without its thoughts. `is_last`: it is the last
// message.
std::string answer(std::string_view content, bool keeps_thoughts, bool is_last) {
  std::string_view thoughts;
  if (contains(content, kThinkEnd)) {
    thoughts = without_newlines_after(content.substr(0, content.find(kThinkEnd)));
    if (const std::size_t begin = thoughts.rfind(kThinkBegin); begin != std::string_view::npos) {
      thoughts.remove_prefix(begin + kThinkBegin.size());
    }
    thoughts = without_newlines_after(without_newlines_before(thoughts));
    content = without_newlines_before(content.substr(content.rfind(kThinkEnd) + kThinkEnd.size()));
  }
  if (!keeps_thoughts || (!is_last && thoughts.empty())) {
    return std::string(content);
  }
  return "<think>\n" + std::string(thoughts) + "\n</think>\n\n" + std::string(without_newlines_before(content));
}

ChatParts chatml_parts(std::span<const ChatMessage> messages, const ChatOptions& options, const ChatMl& c) {
  ChatParts parts;
  const auto add = [&](const std::string& role, const std::string& content) {
    parts.push_back({"<|im_start|>", true});
    parts.push_back({role + "\n" + content, false});
    parts.push_back({"<|im_end|>", true});
    parts.push_back({"\n", false});
  };
  if (messages.front().role != "system" && !c.default_system.empty()) {
    add("system", c.default_system);
  }
  // Thoughts about the last question are kept. A tool's response is not a question.
  std::size_t last_question = messages.size();
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& content = messages[i].content;
    if (messages[i].role == "user" &&
        !(content.starts_with("<tool_response>") && content.ends_with("</tool_response>"))) {
      last_question = i;
    }
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto& [role, content] = messages[i];
    const bool is_answer = c.has_thoughts && role == "assistant";
    add(role, is_answer ? answer(content, i > last_question, i + 1 == messages.size()) : content);
  }
  if (options.add_generation_prompt) {
    parts.push_back({"<|im_start|>", true});
    std::string begun = "assistant\n";
    if (c.always_thinks) {
      begun += "<think>\n";
    } else if (c.has_thoughts && !options.thinking) {
      begun += "<think>\n\n</think>\n\n";
    }
    parts.push_back({begun, false});
  }
  return parts;
}

}  // namespace

std::optional<ChatWriter> chatml_chat(std::string_view jinja) {
  // Other models use the same tokens in other ways. What identifies Qwen 3's templates is when they keep thoughts.
  const bool has_thoughts = contains(jinja, kThinkEnd);
  if (!contains(jinja, "<|im_start|>") || !contains(jinja, "<|im_end|>") || contains(jinja, "<|im_sep|>") ||
      contains(jinja, "bos_token") || (has_thoughts && !contains(jinja, "(not loop.last and reasoning_content)"))) {
    return std::nullopt;
  }
  ChatMl chat{.has_thoughts = has_thoughts,
              .always_thinks = contains(jinja, "<|im_start|>assistant\\n<think>\\n'"),
              .default_system = default_system_of(jinja)};
  return ChatWriter{
      .parts = [chat = std::move(chat)](std::span<const ChatMessage> messages,
                                        const ChatOptions& options) { return chatml_parts(messages, options, chat); },
      .end_token = "<|im_end|>"};
}

}  // namespace mica::io::detail
