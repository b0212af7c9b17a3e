#include <mica/core/memory.h>
#include <mica/core/storage.h>

namespace mica {

Storage::Storage(std::size_t bytes, Device device) : bytes_(bytes), device_(device) {
  // The device is asked for even if there is nothing to allocate, so that a wrong one is an error in every case.
  on_device(device, [&](auto d) {
    if (bytes > 0) {
      data_ = static_cast<std::byte*>(memory::allocate(d, bytes, &stream_));
    }
  });
}

Storage::Storage(std::byte* data, std::size_t bytes, Device device)
    : data_(data), bytes_(bytes), device_(device), owned_(false) {}

Storage::~Storage() {
  if (data_ != nullptr && owned_) {
    on_device(device_, [&](auto d) { memory::deallocate(d, data_, bytes_, stream_); });
  }
}

}  // namespace mica
