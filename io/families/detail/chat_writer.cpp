#include <mica/io/detail/unicode.h>
#include <mica/io/families/detail/chat_writer.h>

namespace mica::io::detail {

namespace {

// Like Python's str.strip().
std::string_view stripped(std::string_view text) {
  const auto is_space = [&](std::size_t at) {
    const char32_t code = character_at(text.data() + at).code;
    return CharacterKinds::get().kind(code) == Kind::space || (code >= 0x1C && code <= 0x1F);
  };
  while (!text.empty() && is_space(0)) {
    text.remove_prefix(character_at(text.data()).length);
  }
  while (!text.empty() && is_space(character_before(text, text.size()))) {
    text = text.substr(0, character_before(text, text.size()));
  }
  return text;
}

}  // namespace

std::string stripped_content(const ChatMessage& message) {
  return std::string(stripped(repaired_utf8(message.content)));
}

}  // namespace mica::io::detail
