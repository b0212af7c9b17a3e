#include <mica/core/check.h>
#include <mica/core/memory.h>
#include <mica/core/memory_stats.h>
#include <mica/core/storage.h>

namespace mica {

namespace {

thread_local constinit bool count_writes = true;

}  // namespace

namespace detail {

bool storages_count_writes() { return count_writes; }
void set_storages_count_writes(bool on) { count_writes = on; }

}  // namespace detail

Storage::Storage(std::size_t bytes, Device device) : bytes_(bytes), device_(device), counts_writes_(count_writes) {
  // The device is selected even if there is nothing to allocate, so that an invalid one is always an error.
  on_device(device, [&](auto d) {
    if (bytes > 0) {
      data_ = static_cast<std::byte*>(memory::allocate(d, bytes, &stream_));
      detail::count_allocated(device, bytes);
    }
  });
}

Storage::Storage(std::byte* data, std::size_t bytes, Device device)
    : data_(data), bytes_(bytes), device_(device), owned_(false), counts_writes_(count_writes) {}

Storage::~Storage() {
  if (data_ != nullptr && owned_) {
    try {
      on_device(device_, [&](auto d) { memory::deallocate(d, data_, bytes_, stream_); });
    } catch (const Error&) {
      // The device cannot be made current: a static tensor outlives the driver at program exit.
    }
    detail::count_freed(device_, bytes_);
  }
}

}  // namespace mica
