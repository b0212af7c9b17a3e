#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <mica/core/device.h>

namespace mica {

/// A block of memory on one device, freed with its last owner. Tensors that are views of each other share it.
class Storage {
 public:
  /// Allocates uninitialized memory; throws OutOfMemory, which leaves everything as it was.
  Storage(std::size_t bytes, Device device);
  /// Memory that somebody else owns and keeps alive.
  Storage(std::byte* data, std::size_t bytes, Device device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Counts the writes in place. A tensor saved for backward remembers the count it was saved at.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  /// `writer` names who wrote, for errors; it must live as long as the program, as a literal does.
  void bump_version(const char* writer) {
    if (counts_writes_) {
      version_.fetch_add(1, std::memory_order_relaxed);
      last_writer_.store(writer, std::memory_order_relaxed);
    }
  }
  /// Who wrote in place last; null if nobody has.
  const char* last_writer() const { return last_writer_.load(std::memory_order_relaxed); }
  /// False if it was made in inference mode: then writes are not counted, and no graph may rely on it.
  bool counts_writes() const { return counts_writes_; }
  /// Makes the count at least `version`.
  void raise_version(std::uint32_t version, const char* writer) {
    last_writer_.store(writer, std::memory_order_relaxed);
    if (version_.load(std::memory_order_relaxed) < version) {
      version_.store(version, std::memory_order_relaxed);
    }
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_;
  bool owned_ = true;
  const bool counts_writes_;
  void* stream_ = nullptr;  // CUDA: the stream whose order the memory follows
  std::atomic<std::uint32_t> version_{0};
  std::atomic<const char*> last_writer_{nullptr};
};

namespace detail {
/// Whether storages that this thread makes count writes; autograd::InferenceMode decides.
bool storages_count_writes();
void set_storages_count_writes(bool on);
}  // namespace detail

}  // namespace mica
