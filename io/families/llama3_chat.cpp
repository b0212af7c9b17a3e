#include <mica/io/families/detail/chat_writer.h>

namespace mica::io::detail {

namespace {

ChatParts llama3_parts(std::span<const ChatMessage> messages, const ChatOptions& options, bool has_dates) {
  ChatParts parts{{"<|begin_of_text|>", true}};
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
  if (has_dates) {
    std::string system = "Cutting Knowledge Date: December 2023\nToday Date: " + options.date + "\n\n";
    if (messages.front().role == "system") {
      system += stripped_content(messages.front());
      messages = messages.subspan(1);
    }
    add("system", system);
  }
  for (const ChatMessage& message : messages) {
    add(message.role, stripped_content(message));
  }
  if (options.add_generation_prompt) {
    header("assistant");
    parts.push_back({"\n\n", false});
  }
  return parts;
}

}  // namespace

std::optional<ChatWriter> llama3_chat(std::string_view jinja) {
  // Other models use the same tokens in other ways. What identifies these templates is how they strip a message.
  if (!contains(jinja, "<|start_header_id|>") || !contains(jinja, "| trim + '<|eot_id|>'")) {
    return std::nullopt;
  }
  const bool has_dates = contains(jinja, "Cutting Knowledge Date");
  return ChatWriter{
      .parts = [has_dates](std::span<const ChatMessage> messages,
                           const ChatOptions& options) { return llama3_parts(messages, options, has_dates); },
      .end_token = "<|eot_id|>"};
}

}  // namespace mica::io::detail
