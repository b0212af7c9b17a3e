// The first line of the input is vocab.json; if it is empty, the vocabulary has all bytes, and pairs of the first
// letters. The second line is tokenizer_config.json. The rest is merges.txt, and also the text for the tokenizer.

#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/byte_tokens.h"
#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/chat.h>
#include <mica/io/tokenizer.h>

using namespace mica;

namespace {

std::string own_vocabulary() {
  io::JsonValue::Object vocabulary;
  const auto add = [&](const std::string& token) {
    vocabulary.emplace(token, io::JsonValue{static_cast<std::int64_t>(vocabulary.size())});
  };
  for (const std::string& token : fuzz::byte_tokens()) {
    add(token);
  }
  for (char first = 'a'; first <= 'h'; ++first) {
    for (char second = 'a'; second <= 'h'; ++second) {
      add({first, second});
    }
  }
  add("<|endoftext|>");
  return io::to_json({vocabulary});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Folder folder("merges_fuzz");
  static const std::string own = own_vocabulary();
  std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view vocabulary = fuzz::take_line(input), config = fuzz::take_line(input);
  folder.write("vocab.json", vocabulary.empty() ? own : vocabulary);
  folder.write("tokenizer_config.json", config.empty() ? "{}" : config);
  folder.write("merges.txt", input);
  try {
    const auto tokenizer = io::Tokenizer::load(folder.path());
    for (const std::int64_t token : tokenizer.special_tokens()) {
      fuzz::expect(tokenizer.has_token(token));
    }
    const std::string decoded = tokenizer.decode(tokenizer.encode(input), {.skip_special_tokens = false});
    fuzz::expect(io::detail::valid_utf8_length(decoded) == decoded.size());
    if (vocabulary.empty() && config.empty()) {
      fuzz::expect(decoded == io::detail::repaired_utf8(input));
    }
    (void)io::ChatFormat(tokenizer);
  } catch (const Error&) {
  }
  return 0;
}
