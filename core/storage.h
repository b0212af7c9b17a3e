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

  /// The elements. First waits for a pending transfer into them (arrive_later()).
  std::byte* data() const {
    if (is_on_its_way()) [[unlikely]] {
      arrive();
    }
    return data_;
  }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Registers a transfer, such as a collective, that is still writing the elements. `wait` waits until it has ended;
  /// on a GPU, it makes the current stream wait. The first data() or arrive() on any thread calls `wait`, so only a
  /// pointer taken before can read too early. If `wait` throws, each such call throws the same. The storage is kept
  /// alive until then. `wait` must not read these elements, and only one transfer may be pending.
  static void arrive_later(const std::shared_ptr<Storage>& storage, std::function<void()> wait);
  bool is_on_its_way() const { return on_its_way_.load(std::memory_order_acquire); }
  /// Waits for the pending transfer, if there is one.
  void arrive() const;
  /// Calls arrive() for all storages. CUDA graphs need it, since their kernels read elements without calling data().
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
