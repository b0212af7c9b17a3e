// Reads any bytes as UTF-8 text: decoding and encoding must give the same bytes, or throw an Error. In that case the
// input must be invalid by table 3-7 of the Unicode standard, which is implemented here.

#include <string>
#include <string_view>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/text.h>

using namespace mica;

namespace {

bool between(std::uint8_t byte, std::uint8_t first, std::uint8_t last) { return byte >= first && byte <= last; }

// The length of the valid character that begins at `at`, or 0 if there is none.
std::size_t character_length(const std::uint8_t* at, std::size_t left) {
  const auto more = [&](std::size_t i) { return i < left && between(at[i], 0x80, 0xBF); };
  const auto second = [&](std::uint8_t first, std::uint8_t last) { return left > 1 && between(at[1], first, last); };
  const std::uint8_t lead = at[0];
  if (lead <= 0x7F) {
    return 1;
  }
  if (between(lead, 0xC2, 0xDF)) {
    return more(1) ? 2 : 0;
  }
  if (between(lead, 0xE0, 0xEF)) {
    const bool ok = lead == 0xE0 ? second(0xA0, 0xBF) : lead == 0xED ? second(0x80, 0x9F) : second(0x80, 0xBF);
    return ok && more(2) ? 3 : 0;
  }
  if (between(lead, 0xF0, 0xF4)) {
    const bool ok = lead == 0xF0 ? second(0x90, 0xBF) : lead == 0xF4 ? second(0x80, 0x8F) : second(0x80, 0xBF);
    return ok && more(2) && more(3) ? 4 : 0;
  }
  return 0;
}

bool is_utf8(const std::uint8_t* data, std::size_t size) {
  for (std::size_t at = 0; at < size;) {
    const std::size_t length = character_length(data + at, size - at);
    if (length == 0) {
      return false;
    }
    at += length;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  bool accepted = false;
  try {
    const std::u32string characters = io::from_utf8(text);
    accepted = true;
    fuzz::expect(io::to_utf8(characters) == text);
  } catch (const Error&) {
    fuzz::expect(!accepted);
  }
  fuzz::expect(accepted == is_utf8(data, size));

  // Also interprets the bytes as code points, most of which are invalid.
  std::u32string points;
  for (std::size_t i = 0; i + 4 <= size; i += 4) {
    points.push_back(static_cast<char32_t>(data[i]) << 24 | static_cast<char32_t>(data[i + 1]) << 16 |
                     static_cast<char32_t>(data[i + 2]) << 8 | data[i + 3]);
  }
  try {
    (void)io::to_utf8(points);
  } catch (const Error&) {
  }
  return 0;
}
