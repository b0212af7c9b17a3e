// Runs a tokenizer of single characters with any alphabet on any text and any tokens. The first line of the input is
// the alphabet.

#include <cstring>
#include <string_view>
#include <vector>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/text.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = input.find('\n');
  const std::string_view alphabet = input.substr(0, end);
  const std::string_view text = end == std::string_view::npos ? std::string_view() : input.substr(end + 1);
  try {
    const io::CharTokenizer own = io::CharTokenizer::of(text);
    fuzz::expect(own.decode(own.encode(text)) == text);
  } catch (const Error&) {
  }
  try {
    const io::CharTokenizer tokenizer(alphabet);
    fuzz::expect(tokenizer.alphabet() == alphabet);
    std::vector<std::int32_t> tokens(text.size() / sizeof(std::int32_t));
    if (!tokens.empty()) {
      std::memcpy(tokens.data(), text.data(), tokens.size() * sizeof(std::int32_t));
    }
    try {
      fuzz::expect(tokenizer.encode(tokenizer.decode(tokens)) == tokens);
    } catch (const Error&) {
    }
    fuzz::expect(tokenizer.decode(tokenizer.encode(text)) == text);
  } catch (const Error&) {
  }
  return 0;
}
