#pragma once

// Files as save and load need them: reads and writes that are whole or an Error, and replacing a file in one step.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace mica::io {

/// A regular file open for reading.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  /// Reads `bytes` bytes from position `offset`.
  void read(void* data, std::uint64_t bytes, std::uint64_t offset) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// A file written beside `path` that takes its place on commit(), once everything is on the disk. Without a commit
/// it leaves nothing behind.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::uint64_t bytes);
  void commit();

 private:
  [[noreturn]] void fail_to(const char* what) const;
  void close_quietly();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

}  // namespace mica::io
