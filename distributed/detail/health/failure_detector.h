#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <mica/distributed/detail/health/heartbeat.h>

namespace mica::distributed::detail {

/// Decides on rank 0, from the ranks' reports, whether one of them has failed, and which. All times are in seconds, on
/// one clock. It has no clock of its own, so equal calls give equal decisions.
class FailureDetector {
 public:
  struct Options {
    double heartbeat_interval = 1;   ///< between two reports of a rank
    double heartbeat_timeout = 10;   ///< a rank that sends nothing for this long hangs or has lost its connection
    double collective_timeout = 20;  ///< a rank for which others wait longer in a collective hangs; 0: no limit
  };

  /// `labels` gives the process and machine of each rank.
  FailureDetector(std::vector<std::string> labels, const Options& options, double now);

  void set_collective_timeout(double seconds) { options_.collective_timeout = seconds; }

  // The reports of `rank`. Each also shows that it is alive.

  /// It is alive, and has used this much processor time. While it has a `task`, others wait for it without a timeout.
  void alive(int rank, double processor_time, std::string task, double now);
  /// It belongs to a group. Throws an Error if the members are not ranks, or differ from those that another rank has
  /// reported.
  void join(int rank, std::uint64_t group, const std::vector<int>& members, double now);
  /// It no longer uses the group.
  void drop(int rank, std::uint64_t group, double now);
  /// Its heartbeat about one group. Throws an Error for a group that it did not join.
  void heartbeat(int rank, const Heartbeat& heartbeat, double now);
  /// Its program ends, normally or with the failure that `reason` describes.
  void leave(int rank, bool failed, const std::string& reason, double now);
  /// A collective failed there, perhaps because of another rank.
  void error(int rank, const std::string& reason, double now);
  /// Its connection was closed. `reason` is set if that was because of invalid data from the rank.
  void closed(int rank, const std::string& reason, double now);

  /// Counts the others' silence from now on, because this process itself was suspended.
  void restart_silence(double now);

  /// Which ranks have failed, and how, once it is certain; nullopt before. Does not change afterwards.
  const std::optional<std::string>& failure(double now);

  /// Whether a failure will follow, though it may not be certain yet.
  bool has_suspicion() const { return !suspicions_.empty(); }
  /// Whether all ranks have reported that they called the same collectives as `rank`, as far as it has.
  bool has_confirmed(int rank) const;
  /// Whether all ranks but 0 have left or closed their connection.
  bool all_left() const;
  /// The members of a group; null if no rank has joined it.
  const std::vector<int>* members(std::uint64_t group) const;

  /// The number of calls of a group that are remembered.
  static constexpr std::size_t remembered = Heartbeat::most_calls;

 private:
  struct Rank {
    std::string label;
    double heard;  // when it was last heard of
    bool left = false;
    bool closed = false;
    double processor_time = 0;
    double processor_time_at_progress = 0;
    std::string task{};
  };

  // The ranks that reported the same call as collective `number`. More than one variant: they diverged.
  struct Variant {
    Call call;
    std::vector<int> ranks;
  };
  struct Reported {
    std::uint64_t number = 0;
    std::vector<Variant> variants{};
  };

  struct Member {
    bool joined = false;
    std::uint64_t started = 0;
    std::optional<Heartbeat::Pending> pending{};
  };

  struct Group {
    std::vector<int> members{};
    std::map<int, Member> states{};                                      // of each member
    int users = 0;                                                       // ranks that have joined and not dropped it
    std::vector<Reported> reported = std::vector<Reported>(remembered);  // collective n is at n % remembered
  };

  // In order of priority: of several at the same time, the first kind is the cause of the others.
  enum class Kind { died, failed, diverged, left, silent, late, error };

  struct Suspicion {
    Kind kind;
    double certain;  // the time by which reports that would explain it better have arrived
    std::vector<int> ranks;
    std::string text;
  };

  // Ranks that wait in collectives, and those for which they wait.
  struct Waits {
    std::set<int> late;      // others have waited for these longer than the timeout
    std::set<int> culprits;  // those of them that wait for nobody themselves
    bool deadlock = false;   // all of them wait for each other
  };

  std::string label(int rank) const;
  std::string suffix(const Group& group) const;
  std::string name(const Group& group, std::uint64_t number, const Call& call) const;
  std::vector<int> missing(const Group& group, std::uint64_t number) const;
  void suspect(Kind kind, double certain, std::vector<int> ranks, std::string text);
  void record(int rank, const Heartbeat& heartbeat, Group& group, double now);
  void suspect_divergence(std::uint64_t id, const Group& group, const Reported& reported, double now);
  void suspect_silent(double now);
  void suspect_left(double now);
  void suspect_late(double now);
  Waits find_waits() const;
  std::optional<Heartbeat::Pending> first_overdue(const Group& group) const;
  void suspect_late_in(const Group& group, const Heartbeat::Pending& overdue, const Waits& waits, double now);

  Options options_;
  std::vector<Rank> ranks_;
  std::map<std::uint64_t, Group> groups_;
  std::vector<Suspicion> suspicions_;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> diverged_;  // group and number
  std::optional<std::string> failure_;
};

/// "rank 3", "ranks 0 and 1", "ranks 0, 1 and 3"; of more than 20, the first 19 and "… (100 ranks)"
std::string list_ranks(std::vector<int> ranks);

}  // namespace mica::distributed::detail
