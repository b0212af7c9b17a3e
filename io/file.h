#pragma once

// File access for save and load: complete reads and writes or an Error, and atomic replacement of a file.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace mica::io {

/// The system's description of the error `number`, a value of errno.
std::string error_text(int number);

/// Whether anything exists at `path`, including what cannot be opened, such as a dangling link: opening it will report
/// the problem. Does not throw.
bool is_there(const std::filesystem::path& path);

/// Creates the folder, and its parents, if they do not exist. Throws an Error that starts with `what`.
void make_folder(const std::filesystem::path& path, const char* what);

/// Throws an Error that starts with `what` and gives the reason unless `path` is a folder; an empty path is the current
/// one.
void check_folder(const std::filesystem::path& path, const char* what);

/// A regular file that is open for reading. Errors name the file.
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
/// while it is mapped; it may be renamed, replaced or removed. A read behind the end of a truncated file, or from a
/// disk that fails, raises SIGBUS, which by default ends the process; see mapped_path_at().
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) : MappedFile(InputFile(path)) {}
  /// With `writable`, a write changes a private copy of its page, never the file.
  explicit MappedFile(const InputFile& file, bool writable = false);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::span<const std::byte> bytes() const& { return bytes_; }
  std::span<const std::byte> bytes() const&& = delete;

 private:
  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

/// The path of the MappedFile that contains an address, or null. May be called in a signal handler: a handler of SIGBUS
/// can say which file cannot be read.
const char* mapped_path_at(const void* address) noexcept;

/// A temporary file in the folder of `path` that replaces it on commit(), after everything is flushed to disk. Without
/// commit() it is removed; if the process was killed, the next AtomicFile for the same path removes it. Errors start
/// with "save: " and name `path`.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::uint64_t bytes);  ///< appends
  /// Overwrites the first bytes, which were written before.
  void rewrite_start(const void* data, std::uint64_t bytes);
  void commit();

 private:
  [[noreturn]] void fail_to(const char* what) const;
  void write_at(std::uint64_t position, const void* data, std::uint64_t bytes);
  void open();
  void close_quietly();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// Replaces the file by `text`, or creates it: see AtomicFile.
void write_text(const std::filesystem::path& path, std::string_view text);

/// Appends all of `text` to an open file or, if that fails, nothing, and throws an Error that begins with `what` and
/// has the reason. `path` is the file's name for the Error.
void append(const char* what, int descriptor, std::string_view text, const std::filesystem::path& path);

/// Removes temporary files that an AtomicFile left in `folder` because its process was killed: those of files whose
/// name satisfies `fits`. Files that a process is still writing are kept, and so are all files if the file system does
/// not support flock().
void remove_unfinished(const std::filesystem::path& folder, const std::function<bool(const std::string& name)>& fits);

}  // namespace mica::io
