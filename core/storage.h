#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <mica/core/device.h>

namespace mica {

/// A block of memory on one device, freed with its last owner. Views share the storage of their base.
class Storage {
 public:
  /// Allocates uninitialized memory. Throws OutOfMemory, with no effect.
  Storage(std::size_t bytes, Device device);
  /// Wraps memory that is owned elsewhere and must stay alive.
  Storage(std::byte* data, std::size_t bytes, Device device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  /// The elements. Waits first for those that are on their way.
  std::byte* data() const {
    if (is_on_its_way()) [[unlikely]] {
      arrive();
    }
    return data_;
  }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Says that something else writes the elements, such as a collective, and that `wait` waits for its end: on a GPU,
  /// the current stream does. The first data() or arrive() on any thread calls it, so nobody can read too early, except
  /// through a pointer from before. If `wait` throws, so do they, each time. Keeps the storage until then. `wait` must
  /// not read these elements, and nothing else may be on its way to them.
  static void arrive_later(const std::shared_ptr<Storage>& storage, std::function<void()> wait);
  bool is_on_its_way() const { return on_its_way_.load(std::memory_order_acquire); }
  /// Does nothing unless is_on_its_way().
  void arrive() const;
  /// Of all storages. CUDA graphs call it before they read elements without asking for them.
  static void arrive_all();

  /// The number of in-place writes. A tensor saved for backward stores it, to detect later writes.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  /// `writer` names the op, for errors; it must be a string with static lifetime, such as a literal.
  void bump_version(const char* writer) {
    if (counts_writes_) {
      version_.fetch_add(1, std::memory_order_relaxed);
      last_writer_.store(writer, std::memory_order_relaxed);
    }
  }
  /// The op that last wrote in place, or null.
  const char* last_writer() const { return last_writer_.load(std::memory_order_relaxed); }
  /// False for storages created in inference mode: writes are not counted, and no graph may save them.
  bool counts_writes() const { return counts_writes_; }
  /// Raises the count to at least `version`.
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
  mutable std::atomic<bool> on_its_way_{false};
  void* stream_ = nullptr;  // CUDA: the stream that the memory was allocated on
  std::atomic<std::uint32_t> version_{0};
  std::atomic<const char*> last_writer_{nullptr};
};

namespace detail {
/// Whether storages created on this thread count writes; set by autograd::InferenceMode.
bool storages_count_writes();
void set_storages_count_writes(bool on);
}  // namespace detail

}  // namespace mica
