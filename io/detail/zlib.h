#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace mica::io::detail {

/// Whether bytes begin as a file that was compressed by gzip.
bool is_gzip(std::span<const std::byte> file);

/// Decompresses a file in gzip's format piece by piece. Errors name the file. Several such files in a row count as one.
class Gunzip {
 public:
  /// Keeps references to both arguments.
  Gunzip(std::span<const std::byte> file, const std::string& name);
  ~Gunzip();
  Gunzip(const Gunzip&) = delete;
  Gunzip& operator=(const Gunzip&) = delete;

  /// Fills `to` and returns the number of bytes, which is smaller only at the end of the file.
  std::size_t read(std::span<std::byte> to);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mica::io::detail
