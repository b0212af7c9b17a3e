#include <algorithm>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/chat.h>
#include <mica/io/detail/unicode.h>

namespace mica::io {

namespace {

constexpr std::string_view kThinkBegin = "<think>", kThinkEnd = "</think>";

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Like Python's str.strip().
std::string_view stripped(std::string_view text) {
  const auto is_space = [&](std::size_t at) {
    const char32_t code = detail::character_at(text.data() + at).code;
    return detail::CharacterKinds::get().kind(code) == detail::Kind::space || (code >= 0x1C && code <= 0x1F);
  };
  while (!text.empty() && is_space(0)) {
    text.remove_prefix(detail::character_at(text.data()).length);
  }
  while (!text.empty() && is_space(detail::character_before(text, text.size()))) {
    text = text.substr(0, detail::character_before(text, text.size()));
  }
  return text;
}

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

}  // namespace

ChatFormat::ChatFormat(std::string_view jinja) {
  check(!jinja.empty(), "ChatFormat: the tokenizer has no chat template; is this a model for chats?");
  // Other models use the same tokens in other ways. What identifies Llama 3's templates is how they strip a message;
  // Qwen 3's, when they keep thoughts.
  if (contains(jinja, "<|start_header_id|>") && contains(jinja, "| trim + '<|eot_id|>'")) {
    family_ = Family::llama3;
    has_dates_ = contains(jinja, "Cutting Knowledge Date");
    return;
  }
  has_thoughts_ = contains(jinja, kThinkEnd);
  const bool is_chatml = contains(jinja, "<|im_start|>") && contains(jinja, "<|im_end|>") &&
                         !contains(jinja, "<|im_sep|>") && !contains(jinja, "bos_token") &&
                         (!has_thoughts_ || contains(jinja, "(not loop.last and reasoning_content)"));
  check(is_chatml, "ChatFormat: this chat template is not supported, only those of Llama 3, Qwen 2 to 3 and SmolLM");
  family_ = Family::chatml;
  always_thinks_ = contains(jinja, "<|im_start|>assistant\\n<think>\\n'");
  default_system_ = default_system_of(jinja);
}

std::vector<ChatFormat::Part> ChatFormat::parts(std::span<const ChatMessage> messages,
                                                const ChatOptions& options) const {
  check(!messages.empty(), "ChatFormat: expected at least one message");
  for (const ChatMessage& message : messages) {
    check(message.role == "system" || message.role == "user" || message.role == "assistant",
          "ChatFormat: expected the role system, user or assistant, got \"{}\"", message.role);
  }
  return family_ == Family::llama3 ? llama3_parts(messages, options) : chatml_parts(messages, options);
}

std::vector<ChatFormat::Part> ChatFormat::llama3_parts(std::span<const ChatMessage> messages,
                                                       const ChatOptions& options) const {
  std::vector<Part> parts{{"<|begin_of_text|>", true}};
  const auto header = [&](const std::string& role) {
    parts.push_back({"<|start_header_id|>", true});
    parts.push_back({role, false});
    parts.push_back({"<|end_header_id|>", true});
  };
  const auto add = [&](const std::string& role, const std::string& content) {
    header(role);
    parts.push_back({"\n\n" + content, false});
    parts.push_back({"<|eot_id|>", true});
  };
  const auto content_of = [](const ChatMessage& message) {
    return std::string(stripped(detail::repaired_utf8(message.content)));
  };
  if (has_dates_) {
    std::string system = "Cutting Knowledge Date: December 2023\nToday Date: " + options.date + "\n\n";
    if (messages.front().role == "system") {
      system += content_of(messages.front());
      messages = messages.subspan(1);
    }
    add("system", system);
  }
  for (const ChatMessage& message : messages) {
    add(message.role, content_of(message));
  }
  if (options.add_generation_prompt) {
    header("assistant");
    parts.push_back({"\n\n", false});
  }
  return parts;
}

std::vector<ChatFormat::Part> ChatFormat::chatml_parts(std::span<const ChatMessage> messages,
                                                       const ChatOptions& options) const {
  std::vector<Part> parts;
  const auto add = [&](const std::string& role, const std::string& content) {
    parts.push_back({"<|im_start|>", true});
    parts.push_back({role + "\n" + content, false});
    parts.push_back({"<|im_end|>", true});
    parts.push_back({"\n", false});
  };
  if (messages.front().role != "system" && !default_system_.empty()) {
    add("system", default_system_);
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
    const bool is_answer = has_thoughts_ && role == "assistant";
    add(role, is_answer ? answer(content, i > last_question, i + 1 == messages.size()) : content);
  }
  if (options.add_generation_prompt) {
    parts.push_back({"<|im_start|>", true});
    std::string begun = "assistant\n";
    if (always_thinks_) {
      begun += "<think>\n";
    } else if (has_thoughts_ && !options.thinking) {
      begun += "<think>\n\n</think>\n\n";
    }
    parts.push_back({begun, false});
  }
  return parts;
}

std::string ChatFormat::answer(std::string_view content, bool keeps_thoughts, bool is_last) {
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

std::string ChatFormat::text(std::span<const ChatMessage> messages, const ChatOptions& options) const {
  std::string text;
  for (const Part& part : parts(messages, options)) {
    text += part.text;
  }
  return text;
}

std::int64_t ChatFormat::special(const Tokenizer& tokenizer, const std::string& token) const {
  const auto id = tokenizer.find(token);
  check(id.has_value(), "ChatFormat: the vocabulary lacks {}, which the chat template needs", token);
  return *id;
}

std::vector<std::int64_t> ChatFormat::encode(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                             const ChatOptions& options) const {
  std::vector<std::int64_t> tokens;
  for (const Part& part : parts(messages, options)) {
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

std::int64_t ChatFormat::end_token(const Tokenizer& tokenizer) const {
  return special(tokenizer, family_ == Family::llama3 ? "<|eot_id|>" : "<|im_end|>");
}

}  // namespace mica::io
