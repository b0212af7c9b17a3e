#include <algorithm>
#include <utility>

#include <mica/core/detail/nesting.h>
#include <mica/core/progress.h>

namespace mica {

namespace {

constexpr std::chrono::milliseconds kInterval{100};

thread_local constinit ProgressObserver* innermost = nullptr;

}  // namespace

std::optional<double> ProgressReport::seconds_left() const {
  if (done <= 0) {
    return std::nullopt;
  }
  return seconds / static_cast<double>(done) * static_cast<double>(total - done);
}

ProgressObserver::ProgressObserver(Callback callback) : callback_(std::move(callback)), outer_(innermost) {
  innermost = this;
}

ProgressObserver::~ProgressObserver() {
  if (innermost != this || tasks_ != 0) {
    detail::ended_out_of_order("ProgressObserver");
  }
  innermost = outer_;
}

ProgressTask::ProgressTask(std::string name, std::int64_t total)
    : name_(std::move(name)),
      total_(std::max<std::int64_t>(total, 1)),
      observer_(innermost != nullptr && innermost->callback_ ? innermost : nullptr),
      done_(total < 1 ? 1 : 0),
      start_(observer_ == nullptr ? Clock::time_point{} : Clock::now()),
      reported_(start_) {
  if (observer_ != nullptr) {
    ++observer_->tasks_;
  }
}

ProgressTask::~ProgressTask() {
  if (observer_ != nullptr) {
    const std::lock_guard lock(mutex_);
    report(true);
    --observer_->tasks_;
  }
}

void ProgressTask::advance(std::int64_t amount) {
  if (observer_ == nullptr) {
    return;
  }
  done_.fetch_add(amount, std::memory_order_relaxed);
  // If another thread is reporting, this one continues with its work.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock() && Clock::now() - reported_ >= kInterval) {
    report(false);
  }
}

void ProgressTask::report(bool finished) {
  reported_ = Clock::now();
  observer_->callback_({.task = name_,
                        .done = std::min(done_.load(std::memory_order_relaxed), total_),
                        .total = total_,
                        .seconds = std::chrono::duration<double>(reported_ - start_).count(),
                        .finished = finished});
}

}  // namespace mica
