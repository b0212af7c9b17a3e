#pragma once

// Sequences of tokens for language models, in memory or in files, which may be larger than memory.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include <mica/io/file.h>

namespace mica::io {

/// A type of lists that own their elements.
template <class R>
concept OwningList = std::ranges::contiguous_range<R> && !std::ranges::borrowed_range<R>;

/// A non-owning view of tokens: a list in memory, or a TokenFile. The tokens must outlive it, so a temporary list, as
/// in `TokenView(tokenizer.encode(text))`, does not compile.
class TokenView {
 public:
  TokenView(std::span<const std::int32_t> tokens);
  TokenView(const std::vector<std::int32_t>& tokens) : TokenView(std::span<const std::int32_t>(tokens)) {}
  template <OwningList R>
  TokenView(const R&&) = delete;
  /// Little-endian unsigned integers of 2 or 4 bytes, at any address.
  TokenView(const std::byte* data, std::int64_t size, int bytes_per_token);

  std::int64_t size() const { return size_; }

  /// Tokens begin … end − 1. Throws Error unless 0 ≤ begin ≤ end ≤ size().
  TokenView part(std::int64_t begin, std::int64_t end) const;

  /// A view of the same tokens whose read() throws Error for a token ≥ `vocab`, since a kernel could not report it.
  TokenView below(std::int64_t vocab) const;

  /// Copies tokens begin, begin + 1, … until `to` is full. Throws Error if there are too few.
  void read(std::int64_t begin, std::span<std::int64_t> to) const;

  /// A checksum of parts that are spread over the tokens, of a short list of all of them: "NUMBER tokens, fingerprint
  /// HEXADECIMAL". As a setting of a checkpoint it detects that a run resumes on other data.
  std::string fingerprint() const;

 private:
  const std::byte* data_;
  std::int64_t size_;
  int bytes_per_token_;
  std::int64_t vocab_ = 0;   // 0: not checked
  std::int64_t offset_ = 0;  // of the first token in the original view
};

/// A file of tokens, mapped into memory: pages are loaded when they are read. Two little-endian formats, distinguished
/// by their first 4 bytes:
///
/// - plain uint16, as written by nanoGPT;
/// - a header of 256 int32, as llm.c writes it (dev/data/data_common.py): magic number, version, number of tokens; then
///   uint16 (magic 20240520, version 1) or uint32 (magic 20240801, version 7).
///
/// Throws Error naming the file if it is empty or inconsistent with its header. The file must not be truncated while it
/// is mapped: a read beyond its end would terminate the program.
class TokenFile {
 public:
  explicit TokenFile(const std::filesystem::path& path);

  /// Valid as long as this object.
  const TokenView& tokens() const& { return tokens_; }
  const TokenView& tokens() const&& = delete;
  /// Size of a token in the file: 2 or 4.
  int bytes_per_token() const { return bytes_per_token_; }

 private:
  MappedFile file_;
  int bytes_per_token_;
  TokenView tokens_;
};

}  // namespace mica::io
