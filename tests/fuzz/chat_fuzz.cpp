// The input up to the first zero byte is a chat template. The next part are tools, and the rest messages, separated by
// zero bytes; the first letter of each is its role. Text in a message must not be able to end the message.

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/byte_tokens.h"
#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/chat.h>
#include <mica/io/detail/jinja.h>

using namespace mica;

namespace {

const std::vector<std::string> kSpecial{"<|begin|>", "<|start|>", "<|end|>"};

constexpr const char* kTemplate =
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";

std::string_view take_part(std::string_view& input) {
  const std::string_view part = input.substr(0, input.find('\0'));
  input.remove_prefix(std::min(part.size() + 1, input.size()));
  return part;
}

std::int64_t count_special(const io::Tokenizer& tokenizer, const std::vector<std::int64_t>& tokens) {
  return std::count_if(tokens.begin(), tokens.end(), [&](std::int64_t token) { return tokenizer.is_special(token); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view jinja = take_part(input);
  const std::string tools(take_part(input));
  std::vector<io::ChatMessage> messages;
  io::detail::jinja::List variables;
  while (!input.empty()) {
    const std::string_view part = take_part(input);
    if (!part.empty()) {
      const std::string role = part[0] == 's' ? "system" : part[0] == 'a' ? "assistant" : "user";
      messages.push_back({role, std::string(part.substr(1))});
      variables.push_back(
          io::detail::jinja::Dict({{"role", role}, {"content", io::detail::repaired_utf8(part.substr(1))}}));
    }
  }
  try {
    const io::detail::jinja::Template own(jinja);
    const io::detail::jinja::Dict all(
        {{"messages", io::detail::jinja::Value::list(std::move(variables))},
         {"tools", tools.empty() ? io::detail::jinja::Value() : io::detail::jinja::parse(tools, "tools")}});
    const std::string text = own.render(all, {.steps = 200'000, .bytes = 1 << 20, .time = 0});
    fuzz::expect(io::detail::valid_utf8_length(text) == text.size());
    fuzz::expect(own.render(all, {.steps = 200'000, .bytes = 1 << 20, .time = 0}) == text);
  } catch (const Error&) {
  }
  if (messages.empty()) {
    return 0;
  }
  static const io::ChatFormat format(fuzz::byte_tokenizer(kSpecial, kTemplate));
  static const io::Tokenizer tokenizer = fuzz::byte_tokenizer(kSpecial, kTemplate);
  try {
    const std::vector<std::int64_t> tokens = format.encode(messages);
    fuzz::expect(tokenizer.decode(tokens, {.skip_special_tokens = false}) == format.text(messages));
    fuzz::expect(count_special(tokenizer, tokens) == static_cast<std::int64_t>(2 * messages.size() + 1));
  } catch (const Error&) {
  }
  return 0;
}
