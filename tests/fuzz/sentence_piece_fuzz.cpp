// Reads any bytes as a SentencePiece model, and tokenizes them and another text.

#include <string>
#include <string_view>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/detail/sentence_piece.h>
#include <mica/io/detail/tokenizer_parts.h>
#include <mica/io/detail/unicode.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  try {
    io::detail::TokenizerSettings settings;
    io::detail::TokenizerDescription description = io::detail::describe_sentence_piece_file(input, settings, "input");
    const io::Tokenizer tokenizer =
        io::detail::TokenizerParts::tokenizer(std::move(description), std::move(settings), "input");
    for (const std::string_view text : {std::string_view(" The  caf\u00e9\u0301 \ufb01 \U0001F600"), input}) {
      const std::vector<std::int64_t> tokens = tokenizer.encode(text);
      fuzz::expect(tokenizer.encode(text) == tokens);  // the second call uses the cache of words
      io::StreamDecoder stream(tokenizer);
      std::string streamed;
      for (const std::int64_t token : tokens) {
        fuzz::expect(tokenizer.has_token(token));
        streamed += stream.push(token);
      }
      fuzz::expect(streamed + stream.finish() == tokenizer.decode(tokens));
    }
  } catch (const Error&) {
  }
  return 0;
}
