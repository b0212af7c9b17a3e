#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/detail/memory.h>
#include <mica/core/memory_stats.h>
#include <mica/core/storage.h>

namespace mica {

namespace {

thread_local constinit bool count_writes = true;

/// A pending transfer into a storage: see Storage::arrive_later().
struct Arrival {
  Arrival(const std::shared_ptr<Storage>& of, std::function<void()> call) : storage(of), wait(std::move(call)) {}

  std::shared_ptr<Storage> storage;
  std::function<void()> wait;
  std::mutex mutex;  // held while `wait` runs
};

/// The pending transfers of all storages. There are few at a time, so they are kept here, and each storage has only a
/// flag.
struct Arrivals {
  std::mutex mutex;
  std::unordered_map<const Storage*, std::shared_ptr<Arrival>> of;
  std::atomic<bool> any{false};

  std::shared_ptr<Arrival> find(const Storage* storage) {
    const std::lock_guard lock(mutex);
    const auto at = of.find(storage);
    return at == of.end() ? nullptr : at->second;
  }
  void insert(const std::shared_ptr<Arrival>& arrival) {
    const std::lock_guard lock(mutex);
    of[arrival->storage.get()] = arrival;
    any = true;
  }
  void erase(const Storage* storage) {
    const std::lock_guard lock(mutex);
    of.erase(storage);
    any = !of.empty();
  }
};

Arrivals& arrivals() {
  static Arrivals& all = *new Arrivals;  // never destroyed: storages may outlive every static
  return all;
}

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

void Storage::arrive_later(const std::shared_ptr<Storage>& storage, std::function<void()> wait) {
  check(!storage->is_on_its_way(), "storage: a transfer into it is already pending");
  arrivals().insert(std::make_shared<Arrival>(storage, std::move(wait)));
  storage->on_its_way_.store(true, std::memory_order_release);
}

void Storage::arrive() const {
  const std::shared_ptr<Arrival> arrival = arrivals().find(this);  // may own this storage, so it is destroyed last
  if (arrival == nullptr) {
    return;
  }
  const std::lock_guard lock(arrival->mutex);
  if (is_on_its_way()) {  // otherwise another thread has waited meanwhile
    arrival->wait();
    arrivals().erase(this);
    on_its_way_.store(false, std::memory_order_release);
  }
}

void Storage::arrive_all() {
  if (!arrivals().any) {
    return;
  }
  std::vector<std::shared_ptr<Arrival>> all;
  {
    const std::lock_guard lock(arrivals().mutex);
    for (const auto& [storage, arrival] : arrivals().of) {
      all.push_back(arrival);
    }
  }
  for (const std::shared_ptr<Arrival>& arrival : all) {
    arrival->storage->arrive();
  }
}

}  // namespace mica
