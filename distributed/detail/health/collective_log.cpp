#include <algorithm>

#include <mica/distributed/detail/health/collective_log.h>

namespace mica::distributed::detail {

std::uint64_t CollectiveLog::begin(const Call& call) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = started_++;
  Entry& of = entry(number);
  of.call = call;
  of.state = State::starting;
  of.replay = false;
  return number;
}

void CollectiveLog::attach(std::uint64_t number, const std::shared_ptr<Transfer>& transfer, bool replay) {
  const std::lock_guard lock(mutex_);
  if (started_ - number > capacity) {
    return;  // its entry was reused for a later collective
  }
  Entry& of = entry(number);
  of.state = transfer != nullptr ? State::running : State::ended;
  of.transfer = transfer;
  of.replay = replay;
}

Heartbeat CollectiveLog::heartbeat(double seconds) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t before = oldest_;
  oldest_ = std::max(oldest_, started_ - std::min<std::uint64_t>(started_, capacity));
  for (; oldest_ < started_; ++oldest_) {
    Entry& of = entry(oldest_);
    if (of.state == State::running) {
      const std::shared_ptr<Transfer> transfer = of.transfer.lock();
      if (transfer == nullptr || transfer->ended()) {
        of.state = State::ended;
      }
    }
    if (of.state != State::ended) {
      break;
    }
  }
  const bool pending = oldest_ < started_;
  age_ = pending && pending_ && oldest_ == before ? age_ + seconds : 0;
  pending_ = pending;

  Heartbeat heartbeat{.group = id_, .started = started_};
  heartbeat.first = std::max(reported_, started_ - std::min<std::uint64_t>(started_, capacity));
  for (std::uint64_t number = heartbeat.first; number < started_; ++number) {
    heartbeat.calls.push_back(entry(number).call);
  }
  reported_ = started_;
  if (pending) {
    const Entry& of = entry(oldest_);
    heartbeat.pending = {.number = oldest_, .call = of.call, .seconds = age_, .replay = of.replay};
  }
  return heartbeat;
}

}  // namespace mica::distributed::detail
