#pragma once

// File access for save and load: complete reads and writes or an Error, and atomic replacement of a file.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace mica::io {

/// What the system says about error `number`, an errno.
std::string error_text(int number);

/// Whether there is anything at `path`, be it something that cannot be read, such as a link to nothing or to itself:
/// opening it says what is wrong. Does not throw.
bool is_there(const std::filesystem::path& path);

/// Makes the folder and those above it, if there is none. Throws an Error that starts with `what`.
void make_folder(const std::filesystem::path& path, const char* what);

/// A regular file open for reading.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  int descriptor() const { return descriptor_; }
  /// Reads `bytes` bytes from position `offset`.
  void read(void* data, std::uint64_t bytes, std::uint64_t offset) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// A regular file mapped into memory: pages are loaded when they are read. The file must not be truncated or written
/// while it is mapped; it may be renamed, replaced or removed.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) : MappedFile(InputFile(path)) {}
  /// With `writable`, a write changes a private copy of its page, never the file.
  explicit MappedFile(const InputFile& file, bool writable = false);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

/// A temporary file in the folder of `path` that replaces it on commit(), after everything is flushed to disk. Without
/// commit() it is removed.
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

/// Removes the temporary files that AtomicFile left in `folder` because its process was killed: those for files whose
/// names fit. Only for files that no other process is writing.
void remove_unfinished(const std::filesystem::path& folder, const std::function<bool(const std::string& name)>& fits);

}  // namespace mica::io
