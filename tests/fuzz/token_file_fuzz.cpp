// Reads any bytes as a token file: all tokens must be read, or there must be an Error.

#include <vector>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/tokens.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::MemoryFile bytes(data, size);
  try {
    const io::TokenFile file(bytes.path());
    const io::TokenView& tokens = file.tokens();
    const auto count = static_cast<std::size_t>(tokens.size()),
               width = static_cast<std::size_t>(file.bytes_per_token());
    const std::size_t header = size - count * width;
    fuzz::expect(count > 0 && (header == 0 || header == 1024));
    std::vector<std::int64_t> all(count);
    tokens.read(0, all);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t expected = 0;
      for (std::size_t k = 0; k < width; ++k) {
        expected |= static_cast<std::uint64_t>(data[header + i * width + k]) << (8 * k);
      }
      fuzz::expect(all[i] == static_cast<std::int64_t>(expected));
    }
    const std::int64_t middle = tokens.size() / 2;
    std::vector<std::int64_t> half(static_cast<std::size_t>(tokens.size() - middle));
    tokens.part(middle, tokens.size()).below(std::int64_t{1} << 16).read(0, half);
  } catch (const Error&) {
  }
  return 0;
}
