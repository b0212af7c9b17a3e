#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include <mica/core/check.h>
#include <mica/io/permutation.h>
#include <mica/io/tokens.h>

namespace mica::io {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie in memory");

namespace {

constexpr std::size_t kHeaderNumbers = 256;
constexpr std::size_t kHeaderBytes = kHeaderNumbers * sizeof(std::int32_t);

// llm.c's formats. Read as uint16, each magic number starts with a number that is not a token of GPT-2, so plain files
// cannot be mistaken for these.
struct Format {
  std::int32_t magic;
  std::int32_t version;
  int bytes_per_token;
};
constexpr Format kFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

const Format* format_of(std::span<const std::byte> file) {
  std::int32_t magic = 0;
  if (file.size() < sizeof(magic)) {
    return nullptr;
  }
  std::memcpy(&magic, file.data(), sizeof(magic));
  for (const Format& format : kFormats) {
    if (magic == format.magic) {
      return &format;
    }
  }
  return nullptr;
}

TokenView tokens_of(const MappedFile& file) {
  const std::span<const std::byte> bytes = file.bytes();
  const std::string path = file.path().string();
  const Format* const format = format_of(bytes);
  if (format == nullptr) {
    check(!bytes.empty(), "token file {}: it is empty", path);
    check(bytes.size() % 2 == 0, "token file {}: expected tokens of 2 bytes, got a file of {} bytes", path,
          bytes.size());
    return {bytes.data(), static_cast<std::int64_t>(bytes.size() / 2), 2};
  }
  check(bytes.size() >= kHeaderBytes, "token file {}: expected a header of {} bytes, got a file of {}", path,
        kHeaderBytes, bytes.size());
  std::array<std::int32_t, 3> header{};  // magic, version, number of tokens
  std::memcpy(header.data(), bytes.data(), sizeof(header));
  check(header[1] == format->version, "token file {}: expected version {}, got {}", path, format->version, header[1]);
  const std::uint64_t rest = bytes.size() - kHeaderBytes;
  check(header[2] > 0, "token file {}: the header says that it has {} tokens", path, header[2]);
  check(static_cast<std::uint64_t>(header[2]) * static_cast<std::uint64_t>(format->bytes_per_token) == rest,
        "token file {}: the header says that it has {} tokens of {} bytes, but {} bytes follow", path, header[2],
        format->bytes_per_token, rest);
  return {bytes.data() + kHeaderBytes, header[2], format->bytes_per_token};
}

template <class T>
void copy(const std::byte* from, std::span<std::int64_t> to) {
  for (std::int64_t& token : to) {
    T value;
    std::memcpy(&value, from, sizeof(value));
    token = value;
    from += sizeof(value);
  }
}

}  // namespace

TokenView::TokenView(std::span<const std::int32_t> tokens)
    : TokenView(reinterpret_cast<const std::byte*>(tokens.data()), static_cast<std::int64_t>(tokens.size()), 4) {}

TokenView::TokenView(const std::byte* data, std::int64_t size, int bytes_per_token)
    : data_(data), size_(size), bytes_per_token_(bytes_per_token) {
  check(size >= 0 && (bytes_per_token == 2 || bytes_per_token == 4),
        "TokenView: expected a size of at least 0 and tokens of 2 or 4 bytes, got {} and {}", size, bytes_per_token);
}

TokenView TokenView::part(std::int64_t begin, std::int64_t end) const {
  check(begin >= 0 && begin <= end && end <= size_, "TokenView: expected a part of {} tokens, got {} … {}", size_,
        begin, end);
  TokenView result = *this;
  result.data_ += begin * bytes_per_token_;
  result.size_ = end - begin;
  result.offset_ += begin;
  return result;
}

TokenView TokenView::below(std::int64_t vocab) const {
  check(vocab >= 1, "TokenView: expected a vocabulary of at least 1, got {}", vocab);
  TokenView result = *this;
  result.vocab_ = vocab;
  return result;
}

void TokenView::read(std::int64_t begin, std::span<std::int64_t> to) const {
  const auto count = static_cast<std::int64_t>(to.size());
  check(begin >= 0 && begin <= size_ && count <= size_ - begin,
        "TokenView: expected to read among {} tokens, got {} from {} on", size_, count, begin);
  const std::byte* const from = data_ + begin * bytes_per_token_;
  if (bytes_per_token_ == 2) {
    copy<std::uint16_t>(from, to);
  } else {
    copy<std::uint32_t>(from, to);
  }
  if (vocab_ > 0) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t token = to[static_cast<std::size_t>(i)];
      check(token < vocab_, "expected tokens below {}, the vocabulary, got {} at position {}", vocab_, token,
            offset_ + begin + i);
    }
  }
}

std::string TokenView::fingerprint() const {
  constexpr std::int64_t pieces = 256, length = 4096;
  std::vector<std::int64_t> piece(static_cast<std::size_t>(std::min(length, size())));
  const auto read_once = static_cast<std::int64_t>(piece.size());
  const std::int64_t last = size() - read_once;  // where the last piece begins
  const std::int64_t count = read_once == 0 ? 0 : std::min(pieces, last / read_once + 2);  // at least 2
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    read(i * last / (count - 1), piece);
    for (const std::int64_t token : piece) {
      sum = mix_seeds(sum, static_cast<std::uint64_t>(token));
    }
  }
  return fmt::format("{} tokens, fingerprint {:016x}", size(), sum);
}

TokenFile::TokenFile(const std::filesystem::path& path)
    : file_(path),
      bytes_per_token_(format_of(file_.bytes()) != nullptr ? format_of(file_.bytes())->bytes_per_token : 2),
      tokens_(tokens_of(file_)) {}

}  // namespace mica::io
