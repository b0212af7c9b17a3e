#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace mica::fuzz {

/// Bytes as a file in memory that can be opened by its path.
class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* data, std::size_t size) : descriptor_(::memfd_create("input", MFD_CLOEXEC)) {
    for (std::size_t done = 0; done < size;) {
      const ssize_t count = ::write(descriptor_, data + done, size - done);
      if (count <= 0) {
        std::abort();
      }
      done += static_cast<std::size_t>(count);
    }
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

/// Aborts unless `ok`, so that the fuzzer reports the input.
inline void expect(bool ok) {
  if (!ok) {
    std::abort();
  }
}

}  // namespace mica::fuzz
