// The input up to the first zero byte is a chat template, or the number of a known one. The rest are messages,
// separated by zero bytes; the first letter of each is its role. Text in a message must not be able to end the message.

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/byte_tokens.h"
#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/chat.h>

using namespace mica;

namespace {

// The parts of known templates that ChatFormat looks at.
constexpr std::array<std::string_view, 5> kTemplates{
    "<|start_header_id|><|end_header_id|>{{ message | trim + '<|eot_id|>' }}",
    "<|start_header_id|><|end_header_id|>{{ message | trim + '<|eot_id|>' }}Cutting Knowledge Date",
    "<|im_start|>system\\nBe kind.<|im_end|>",
    "<|im_start|>assistant<|im_end|></think>(not loop.last and reasoning_content)",
    "<|im_start|>assistant\\n<think>\\n'<|im_end|></think>(not loop.last and reasoning_content)"};

std::string_view take_part(std::string_view& input) {
  const std::string_view part = input.substr(0, input.find('\0'));
  input.remove_prefix(std::min(part.size() + 1, input.size()));
  return part;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const io::Tokenizer tokenizer = fuzz::byte_tokenizer(
      {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"},
      "");
  std::string_view input(reinterpret_cast<const char*>(data), size);
  std::string_view jinja = take_part(input);
  if (jinja.size() == 1) {
    jinja = kTemplates[static_cast<unsigned char>(jinja[0]) % kTemplates.size()];
  }
  std::vector<io::ChatMessage> messages, plain;
  while (!input.empty()) {
    const std::string_view part = take_part(input);
    if (!part.empty()) {
      const std::string role = part[0] == 's' ? "system" : part[0] == 'a' ? "assistant" : "user";
      messages.push_back({role, std::string(part.substr(1))});
      plain.push_back({role, "x"});
    }
  }
  try {
    const io::ChatFormat format(jinja);
    for (const bool prompts : {false, true}) {
      const io::ChatOptions options{.add_generation_prompt = prompts, .thinking = prompts};
      const std::vector<std::int64_t> tokens = format.encode(tokenizer, messages, options);
      fuzz::expect(tokenizer.decode(tokens, {.skip_special_tokens = false}) ==
                   io::detail::repaired_utf8(format.text(messages, options)));
      const auto special = [&](const std::vector<std::int64_t>& all) {
        std::vector<std::int64_t> found;
        std::copy_if(all.begin(), all.end(), std::back_inserter(found),
                     [&](std::int64_t token) { return tokenizer.is_special(token); });
        return found;
      };
      fuzz::expect(special(tokens) == special(format.encode(tokenizer, plain, options)));
    }
    (void)format.end_token(tokenizer);
  } catch (const Error&) {
  }
  return 0;
}
