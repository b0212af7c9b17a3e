#include <type_traits>

#include <mica/core/capture.h>
#include <mica/core/creation.h>
#include <mica/core/detail/host_reader.h>
#include <mica/core/dispatch.h>

namespace mica {

HostReader::HostReader(Device device, std::int64_t count) : device_(device), count_(count) {
  on_device(device, [&](auto kind) {
    if constexpr (std::is_same_v<decltype(kind), Cuda>) {
      pinned_ = detail::pinned_reader(kind, count);
    }
  });
}

void HostReader::start(const Tensor& x) {
  check_not_capturing("HostReader");
  check(x.dtype() == int64 && x.numel() == count_ && x.is_contiguous() && x.device() == device_,
        "HostReader: expected {} contiguous int64 on {}, got {} {} on {}", count_, device_, x.dtype(), x.shape(),
        x.device());
  check(pending_ < 2, "HostReader: two copies are pending already");
  if (pinned_ != nullptr) {
    on_device(device_, [&](auto) { pinned_->start(x); });
  } else {
    values_.push_back(to_vector<std::int64_t>(x));
  }
  ++pending_;
}

void HostReader::start_slot(std::size_t slot) {
  check_not_capturing("HostReader");
  check(pinned_ != nullptr && slot < kSlots, "HostReader: expected a slot below {} on CUDA, got {} on {}", kSlots, slot,
        device_);
  check(pending_ < 2, "HostReader: two copies are pending already");
  on_device(device_, [&](auto) { pinned_->start_slot(slot); });
  ++pending_;
}

std::vector<std::int64_t> HostReader::finish() {
  check(pending_ > 0, "HostReader: no copy is pending");
  --pending_;
  if (pinned_ != nullptr) {
    return pinned_->finish();
  }
  std::vector<std::int64_t> values = std::move(values_.front());
  values_.pop_front();
  return values;
}

}  // namespace mica
