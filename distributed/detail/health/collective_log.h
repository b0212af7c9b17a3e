#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <mica/distributed/detail/health/heartbeat.h>
#include <mica/distributed/detail/transfer.h>

namespace mica::distributed::detail {

/// Records the collectives of a group that this rank has started. Adds some tens of nanoseconds to each.
class CollectiveLog {
 public:
  /// `members` are the ranks in the world, in the order of the group.
  CollectiveLog(std::uint64_t id, std::vector<int> members) : id_(id), members_(std::move(members)), ring_(capacity) {}

  std::uint64_t id() const { return id_; }
  const std::vector<int>& members() const { return members_; }

  /// Records that a collective begins. Returns its number.
  std::uint64_t begin(const Call& call);
  /// Records the transfer of a collective that was started; null: it has ended already. `replay`: it is part of a CUDA
  /// graph, and counts as pending until the whole graph has run.
  void attach(std::uint64_t number, const std::shared_ptr<Transfer>& transfer, bool replay = false);

  /// The next report. `seconds` have passed since the last one.
  Heartbeat heartbeat(double seconds);

  /// The number of calls that are remembered until the next report.
  static constexpr std::size_t capacity = Heartbeat::most_calls;

 private:
  enum class State : std::uint8_t { starting, running, ended };
  struct Entry {
    Call call;
    State state = State::ended;
    bool replay = false;
    std::weak_ptr<Transfer> transfer;
  };

  Entry& entry(std::uint64_t number) { return ring_[number % capacity]; }

  const std::uint64_t id_;
  const std::vector<int> members_;
  std::mutex mutex_;  // guards the members below
  std::vector<Entry> ring_;
  std::uint64_t started_ = 0;
  std::uint64_t reported_ = 0;
  std::uint64_t oldest_ = 0;  // all collectives before this number have ended
  bool pending_ = false;      // whether oldest_ had been started at the last report
  double age_ = 0;            // for how long it has been the oldest
};

/// Records a blocking collective for as long as it exists.
class LoggedCall {
 public:
  LoggedCall(CollectiveLog& log, const Call& call) : log_(log), number_(log.begin(call)) {}
  ~LoggedCall() { log_.attach(number_, nullptr); }
  LoggedCall(const LoggedCall&) = delete;
  LoggedCall& operator=(const LoggedCall&) = delete;

  std::uint64_t number() const { return number_; }

 private:
  CollectiveLog& log_;
  std::uint64_t number_;
};

}  // namespace mica::distributed::detail
