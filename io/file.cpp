#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <system_error>

#include <mica/core/check.h>
#include <mica/core/detail/callable.h>
#include <mica/io/file.h>

namespace mica::io {

namespace {

// Below the size limit of a read or write call.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30;

/// The mapped files. Signal handlers read the table, so reading takes no lock.
class Mappings {
 public:
  // With more files than places, mapped_path_at() does not find the others.
  void add(std::span<const std::byte> bytes, const char* path) {
    for (Place& place : places_) {
      bool unused = false;
      if (place.used.compare_exchange_strong(unused, true)) {
        place.path = path;
        place.end = bytes.data() + bytes.size();
        place.begin = bytes.data();
        return;
      }
    }
  }
  void remove(std::span<const std::byte> bytes) {
    for (Place& place : places_) {
      if (place.begin == bytes.data()) {
        place.begin = nullptr;
        place.used = false;
        return;
      }
    }
  }
  const char* path_at(const std::byte* address) const {
    for (const Place& place : places_) {
      const std::byte* const begin = place.begin;
      if (begin != nullptr && begin <= address && address < place.end) {
        return place.path;
      }
    }
    return nullptr;
  }

 private:
  struct Place {
    std::atomic<bool> used{false};
    std::atomic<const std::byte*> begin{nullptr}, end{nullptr};
    std::atomic<const char*> path{nullptr};
  };
  std::array<Place, 1024> places_{};
};

constinit Mappings mappings;

std::filesystem::path folder_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : ".";
}

// Removes an AtomicFile's temporary file unless a process holds its lock.
void remove_if_unlocked(const std::filesystem::path& file) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (descriptor >= 0) {
    if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) {
      ::unlink(file.c_str());
    }
    ::close(descriptor);
  }
}

}  // namespace

const char* mapped_path_at(const void* address) noexcept {
  return mappings.path_at(static_cast<const std::byte*>(address));
}

std::string error_text(int number) { return std::generic_category().message(number); }

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::symlink_status(path, ignored).type() != std::filesystem::file_type::not_found;
}

void make_folder(const std::filesystem::path& path, const char* what) {
  std::error_code error, ignored;
  std::filesystem::create_directories(path, error);
  check(std::filesystem::is_directory(path, ignored), "{}: cannot create the folder {}{}", what, path.string(),
        error ? ": " + error.message() : "");
}

void check_folder(const std::filesystem::path& path, const char* what) {
  struct stat status {};
  if (::stat(path.empty() ? "." : path.c_str(), &status) != 0) {
    fail("{}: cannot open the folder {}: {}", what, path.string(), error_text(errno));
  }
  check(S_ISDIR(status.st_mode), "{}: {} is not a folder", what, path.string());
}

InputFile::InputFile(const std::filesystem::path& path) : path_(path) {
  // Without O_NONBLOCK, opening a FIFO would wait for a writer.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  check(descriptor_ >= 0, "load: cannot open {}: {}", path.string(), error_text(errno));
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    fail("load: {} is not a regular file", path.string());
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read(void* data, std::uint64_t bytes, std::uint64_t offset) const {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pread(descriptor_, at, std::min(bytes, kMaxBytes), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    check(count >= 0, "load: cannot read {}: {}", path_.string(), error_text(errno));
    check(count > 0, "load: {} ended while it was read", path_.string());
    at += count;
    bytes -= static_cast<std::uint64_t>(count);
    offset += static_cast<std::uint64_t>(count);
  }
}

MappedFile::MappedFile(const InputFile& file, bool writable) : path_(file.path()) {
  if (file.size() > 0) {  // an empty file cannot be mapped
    // Without MAP_NORESERVE, a writable mapping of a file larger than the memory may be refused.
    const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    const int kind = writable ? MAP_PRIVATE | MAP_NORESERVE : MAP_PRIVATE;
    void* const data = ::mmap(nullptr, file.size(), access, kind, file.descriptor(), 0);
    check(data != MAP_FAILED, "load: cannot map {}: {}", path_.string(), error_text(errno));
    bytes_ = {static_cast<const std::byte*>(data), file.size()};
    mappings.add(bytes_, path_.c_str());
  }
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    mappings.remove(bytes_);
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path) {
  // Replaces regular files only: replacing a FIFO or a device would break its users.
  std::error_code error;
  const std::filesystem::file_status existing = std::filesystem::status(path, error);
  check(!std::filesystem::is_directory(existing), "save: {} is a directory", path.string());
  check(!std::filesystem::exists(existing) || std::filesystem::is_regular_file(existing),
        "save: {} is not a regular file", path.string());
  remove_unfinished(folder_of(path), [&](const std::string& name) { return name == path.filename().string(); });
  open();
}

void AtomicFile::open() {
  static std::atomic<unsigned> next{0};
  for (;;) {
    temporary_ = path_;
    temporary_ += fmt::format(".{}-{}.tmp", ::getpid(), next.fetch_add(1));
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno == EEXIST) {
      continue;
    }
    if (descriptor_ < 0) {
      fail_to("create");
    }
    // The lock, which ends with the process, tells remove_unfinished() that the file is being written. It may have been
    // faster; then another file is needed.
    const bool taken = ::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    struct stat status {};
    if (!taken && !(::fstat(descriptor_, &status) == 0 && status.st_nlink == 0)) {
      return;
    }
    close_quietly();
  }
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) {
    close_quietly();
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(const void* data, std::uint64_t bytes) {
  write_at(size_, data, bytes);
  size_ += bytes;
}

void AtomicFile::rewrite_start(const void* data, std::uint64_t bytes) { write_at(0, data, bytes); }

void AtomicFile::write_at(std::uint64_t position, const void* data, std::uint64_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pwrite(descriptor_, at, std::min(bytes, kMaxBytes), static_cast<off_t>(position));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      fail_to("write");
    }
    at += count;
    position += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::uint64_t>(count);
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) {
    fail_to("write");
  }
  const std::filesystem::path folder = folder_of(path_);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail_to("write");
  }
  temporary_.clear();
  // From here on nothing may throw. The rename is durable once the directory is flushed too; not every file system
  // supports that.
  if (const int directory = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void AtomicFile::fail_to(const char* what) const {
  fail("save: cannot {} {}: {}", what, path_.string(), error_text(errno));
}

void AtomicFile::close_quietly() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    descriptor_ = -1;
  }
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void append(const char* what, int descriptor, std::string_view text, const std::filesystem::path& path) {
  struct stat status {};
  check(::fstat(descriptor, &status) == 0, "{}: cannot write {}: {}", what, path.string(), error_text(errno));
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), std::min<std::uint64_t>(text.size(), kMaxBytes));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      const int number = errno;
      [[maybe_unused]] const int cut = ::ftruncate(descriptor, status.st_size);
      fail("{}: cannot write {}: {}", what, path.string(), error_text(number));
    }
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

void remove_unfinished(const std::filesystem::path& folder, const std::function<bool(const std::string&)>& fits) {
  check_callable(fits, "remove_unfinished");
  constexpr std::string_view suffix = ".tmp";
  // Not with std::filesystem, whose iterator ends the program if memory runs out.
  struct Close {
    void operator()(DIR* entries) const { ::closedir(entries); }
  };
  const std::unique_ptr<DIR, Close> entries(::opendir(folder.c_str()));
  while (const dirent* const entry = entries == nullptr ? nullptr : ::readdir(entries.get())) {
    // NAME.PROCESS-NUMBER.tmp
    const std::string name = entry->d_name;
    const std::size_t dot =
        name.ends_with(suffix) ? name.rfind('.', name.size() - suffix.size() - 1) : std::string::npos;
    if (dot == std::string::npos || name.size() < dot + 1 + suffix.size()) {
      continue;
    }
    const std::string number = name.substr(dot + 1, name.size() - suffix.size() - dot - 1);
    if (number.find('-') != std::string::npos && number.find_first_not_of("0123456789-") == std::string::npos &&
        fits(name.substr(0, dot))) {
      remove_if_unlocked(folder / name);
    }
  }
}

}  // namespace mica::io
