#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <sstream>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/checksum.h>
#include <mica/io/detail/folder_save.h>
#include <mica/io/file.h>
#include <mica/io/text.h>

namespace mica::io::detail {

namespace {

namespace fs = std::filesystem;

fs::path next_to(const fs::path& file) { return fs::path(file) += ".next"; }

bool has_text(const fs::path& file, const std::string& text) {
  try {
    return read_text(file) == text;
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string description_checksum(const std::string& description) {
  Checksum sum;
  sum.add(description);
  return sum.text();
}

fs::path description_file(const fs::path& folder, const std::string& name, const ChecksumOfWeights& checksum) {
  const fs::path file = folder / name, next = next_to(file);
  if (!is_there(next)) {
    return file;
  }
  try {
    return description_checksum(read_text(next)) == checksum(folder) ? next : file;
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error&) {
    return file;  // reading it, or the weights, will report the problem
  }
}

FolderSave::FolderSave(const char* what, fs::path folder, std::string name, ChecksumOfWeights checksum,
                       std::string description)
    : folder_(std::move(folder)),
      name_(std::move(name)),
      checksum_(std::move(checksum)),
      description_(std::move(description)),
      lock_path_(folder_ / (name_ + ".lock")) {
  make_folder(folder_, what);
  lock(what);
  try {
    settle();
    const fs::path file = folder_ / name_;
    remove_unfinished(folder_, [&](const std::string& unfinished) {
      return unfinished == file.filename() || unfinished == next_to(file).filename();
    });
    if (is_there(file) && !has_text(file, description_)) {
      (void)AtomicFile(file);  // throws if it cannot be replaced
      write_text(next_to(file), description_);
    }
  } catch (...) {
    if (noted_.empty()) {
      ::unlink(lock_path_.c_str());
    }
    ::close(lock_);
    throw;
  }
}

FolderSave::~FolderSave() {
  try {
    settle();
  } catch (const std::exception&) {
    // The next save tries again.
  }
  ::unlink(lock_path_.c_str());
  ::close(lock_);
}

// The lock is that of an open file, which ends with the process. Its contents are the noted names.
void FolderSave::lock(const char* what) {
  for (;;) {
    lock_ = ::open(lock_path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    check(lock_ >= 0, "{}: cannot create {}: {}", what, lock_path_.string(), error_text(errno));
    // Some network file systems do not support locks.
    const bool locked = ::flock(lock_, LOCK_EX | LOCK_NB) == 0;
    struct stat status {};
    if (!locked && errno == EWOULDBLOCK) {
      ::close(lock_);
      fail("{}: another thread or process is saving to {}", what, folder_.string());
    }
    if (::fstat(lock_, &status) == 0 && status.st_nlink > 0) {
      break;
    }
    ::close(lock_);  // another save has just ended and removed the file
  }
  try {
    std::istringstream lines(read_text(lock_path_));
    for (std::string line; std::getline(lines, line);) {
      noted_.push_back(line);
    }
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

void FolderSave::note(const std::vector<std::string>& names) const {
  std::string lines;
  for (const std::string& name : names) {
    lines += name + "\n";
  }
  append("save", lock_, lines, lock_path_);
}

// Gives a ".next" file its place if the weights belong to it, and removes it otherwise.
void FolderSave::settle() const {
  const fs::path file = folder_ / name_, next = next_to(file);
  if (!is_there(next)) {
    return;
  }
  if (description_file(folder_, name_, checksum_) != next) {
    ::unlink(next.c_str());
  } else {
    check(::rename(next.c_str(), file.c_str()) == 0, "save: cannot write {}: {}", file.string(), error_text(errno));
  }
}

void FolderSave::finish() {
  settle();
  if (const fs::path file = folder_ / name_; !has_text(file, description_)) {
    write_text(file, description_);
  }
}

}  // namespace mica::io::detail
