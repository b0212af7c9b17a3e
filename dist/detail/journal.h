#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <mica/dist/detail/beat.h>
#include <mica/dist/detail/collectives.h>

namespace mica::dist::detail {

/// The collectives of a group that this rank has started. Costs a collective some tens of nanoseconds.
class Journal {
 public:
  /// `members` are the ranks in the world, in the order of the group.
  Journal(std::uint64_t id, std::vector<int> members) : id_(id), members_(std::move(members)), ring_(capacity) {}

  std::uint64_t id() const { return id_; }
  const std::vector<int>& members() const { return members_; }

  /// A collective begins. Returns its number.
  std::uint64_t begin(const Call& call);
  /// It was started as `transfer`; null: it has ended.
  void attach(std::uint64_t number, const std::shared_ptr<Transfer>& transfer);

  /// The report. `seconds` have passed since the last one.
  Beat beat(double seconds);

  /// Calls that are remembered until the next report.
  static constexpr std::size_t capacity = Beat::most_calls;

 private:
  enum class State : std::uint8_t { starting, running, ended };
  struct Entry {
    Call call;
    State state = State::ended;
    std::weak_ptr<Transfer> transfer;
  };

  Entry& entry(std::uint64_t number) { return ring_[number % capacity]; }

  const std::uint64_t id_;
  const std::vector<int> members_;
  std::mutex mutex_;  // of what follows
  std::vector<Entry> ring_;
  std::uint64_t started_ = 0;
  std::uint64_t reported_ = 0;
  std::uint64_t oldest_ = 0;  // those before have ended
  bool pending_ = false;      // whether oldest_ had been started at the last report
  double age_ = 0;            // for how long it has been the oldest
};

/// A collective that returns when it has ended.
class Entered {
 public:
  Entered(Journal& journal, const Call& call) : journal_(journal), number_(journal.begin(call)) {}
  ~Entered() { journal_.attach(number_, nullptr); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

  std::uint64_t number() const { return number_; }

 private:
  Journal& journal_;
  std::uint64_t number_;
};

}  // namespace mica::dist::detail
