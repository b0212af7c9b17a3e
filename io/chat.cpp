#include <algorithm>
#include <bitset>
#include <optional>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/chat.h>
#include <mica/io/detail/tokenizer_parts.h>
#include <mica/io/detail/unicode.h>

namespace mica::io {

namespace {

using detail::jinja::Dict;
using detail::jinja::List;
using detail::jinja::Value;

/// Puts a mark into special tokens in the texts of a conversation, so that they are not taken for those of the
/// template.
class Marker {
 public:
  explicit Marker(const Tokenizer& tokenizer) {
    for (const std::int64_t token : tokenizer.special_tokens()) {
      specials_.push_back(detail::TokenizerParts::text(tokenizer, token));
    }
    std::erase(specials_, "");
    for (const std::string& token : specials_) {
      begins_.set(static_cast<unsigned char>(token[0]));
    }
  }

  /// Chooses a noncharacter of Unicode that does not appear in `text`.
  void avoid(std::string_view text) {
    for (char32_t c = 0xFDD0; c < 0xFDF0; ++c) {
      mark_.clear();
      detail::append_utf8(mark_, c);
      if (text.find(mark_) == std::string_view::npos) {
        return;
      }
    }
    fail("ChatFormat: the messages contain all noncharacters from U+FDD0 to U+FDEF");
  }
  const std::string& mark() const { return mark_; }

  std::string marked_text(std::string_view text) const {
    std::string out;
    out.reserve(text.size());
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t length = detail::character_at(text.data() + at).length;
      const std::string_view rest = text.substr(at);
      out += rest.substr(0, length);
      const bool is_special = begins_[static_cast<unsigned char>(rest[0])] &&
                              std::any_of(specials_.begin(), specials_.end(),
                                          [&](const std::string& token) { return rest.starts_with(token); });
      if (is_special) {
        out += mark_;
      }
      at += length;
    }
    return out;
  }
  Value marked(const Value& value) const {
    if (const std::string* const text = value.text()) {
      return marked_text(*text);
    }
    if (const List* const items = value.items()) {
      List all;
      for (const Value& item : *items) {
        all.push_back(marked(item));
      }
      return Value::list(std::move(all));
    }
    if (const Dict* const dict = value.as<Dict>()) {
      Dict::Members all;
      for (const auto& member : dict->members()) {
        all.push_back({marked_text(member.first), marked(member.second)});
      }
      return Dict(std::move(all));
    }
    return value;
  }

 private:
  std::vector<std::string> specials_;
  std::bitset<256> begins_;  // their first bytes
  std::string mark_;
};

Dict dict_of(const std::string& json, const std::string& what) {
  if (json.empty()) {
    return Dict({});
  }
  const Value value = detail::jinja::parse(json, what);
  const auto* const dict = value.as<Dict>();
  check(dict != nullptr, "{}: expected a JSON object", what);
  return *dict;
}

// Thoughts have several names. As transformers, gives them two of these.
void add_reasoning(Dict::Members& members) {
  const Dict dict(members);
  for (const char* const name : {"reasoning_content", "thinking", "reasoning"}) {
    if (const Value* const thoughts = dict.find(name); thoughts != nullptr && !thoughts->is_none()) {
      members.insert(members.begin(), {"thinking", *thoughts});
      members.push_back({"reasoning_content", *thoughts});
      return;
    }
  }
}

// The messages and tools: what may come from others than the model's author.
struct Conversation {
  Value messages, tools;
};

Conversation conversation_of(std::span<const ChatMessage> messages, const ChatOptions& options) {
  check(!messages.empty(), "ChatFormat: expected at least one message");
  List all;
  for (const ChatMessage& message : messages) {
    Dict::Members members{{"role", detail::repaired_utf8(message.role)},
                          {"content", detail::repaired_utf8(message.content)}};
    const Dict others = dict_of(message.others, "ChatFormat: others");
    for (const auto& member : others.members()) {
      members.push_back(member);
    }
    add_reasoning(members);
    all.emplace_back(Dict(std::move(members)));
  }
  Conversation result{Value::list(std::move(all)), nullptr};
  if (!options.tools.empty()) {
    result.tools = detail::jinja::parse(options.tools, "ChatFormat: tools");
    check(result.tools.items() != nullptr, "ChatFormat: expected a JSON list as tools");
  }
  return result;
}

std::string rendered(const detail::jinja::Template& chat_template, const Tokenizer& tokenizer,
                     Conversation conversation, const ChatOptions& options) {
  Dict::Members variables{{"messages", std::move(conversation.messages)},
                          {"tools", std::move(conversation.tools)},
                          {"documents", nullptr},
                          {"add_generation_prompt", options.add_generation_prompt},
                          {"enable_thinking", options.thinking}};
  const detail::TokenizerSettings& settings = detail::TokenizerParts::settings(tokenizer);
  for (const auto& [name, token] : settings.named_tokens) {
    variables.push_back({name, token});
  }
  if (!options.date.empty()) {
    variables.push_back({"date_string", options.date});
  }
  const Dict others = dict_of(options.variables, "ChatFormat: variables");
  for (const auto& member : others.members()) {
    variables.push_back(member);
  }
  return chat_template.render(Dict(std::move(variables)), {.time = options.time});
}

const std::string& template_of(const Tokenizer& tokenizer) {
  check(!tokenizer.chat_template().empty(),
        "ChatFormat: the tokenizer has no chat template; is this a model for chats?");
  return tokenizer.chat_template();
}

}  // namespace

ChatFormat::ChatFormat(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)), template_(template_of(tokenizer_)) {}

std::string ChatFormat::text(std::span<const ChatMessage> messages, const ChatOptions& options) const {
  return rendered(template_, tokenizer_, conversation_of(messages, options), options);
}

std::vector<std::int64_t> ChatFormat::encode(std::span<const ChatMessage> messages, const ChatOptions& options) const {
  const Conversation conversation = conversation_of(messages, options);
  Marker marker(tokenizer_);
  marker.avoid(text_of(conversation.messages) + text_of(conversation.tools) + tokenizer_.chat_template());
  const std::string text = rendered(template_, tokenizer_,
                                    {marker.marked(conversation.messages), marker.marked(conversation.tools)}, options);
  return detail::TokenizerParts::encode_marked(tokenizer_, text, marker.mark());
}

std::int64_t ChatFormat::end_token() const {
  constexpr const char* answer = "an answer";
  std::optional<std::int64_t> end = tokenizer_.eos_token();
  try {
    const std::string text =
        this->text({{{"user", "a question"}, {"assistant", answer}}}, {.add_generation_prompt = false});
    const std::size_t at = text.rfind(answer);
    const auto rest = at == std::string::npos ? std::vector<std::int64_t>()
                                              : tokenizer_.encode(text.substr(at), {.add_special_tokens = false});
    const auto found =
        std::find_if(rest.begin(), rest.end(), [&](std::int64_t token) { return tokenizer_.is_special(token); });
    end = found != rest.end() ? *found : end;
  } catch (const Error&) {  // the template needs other messages
  }
  check(end.has_value(), "ChatFormat: the template has no token that ends an answer, and the tokenizer no eos_token");
  return *end;
}

}  // namespace mica::io
