#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <mica/distributed/detail/health/collective_log.h>

namespace mica::distributed::detail {

/// Decides on rank 0, from the ranks' reports, whether one of them has failed, and which. All times are in seconds, on
/// one clock. Its decisions depend only on the calls made to it, not on a clock of its own.
class Judge {
 public:
  struct Options {
    double beat = 1;         ///< time between two reports of a rank
    double silence = 10;     ///< a rank that sends nothing for this long hangs or has lost its connection
    double collective = 20;  ///< a rank for which others wait longer than this in a collective hangs; 0: no limit
  };

  /// `labels` gives the process and machine of each rank.
  Judge(std::vector<std::string> labels, const Options& options, double now);

  void set_collective_timeout(double seconds) { options_.collective = seconds; }

  // The reports of `rank`. Each also shows that it is alive.

  /// It is alive, and has used this much processor time. While it has a `task`, others wait for it without a timeout.
  void alive(int rank, double processor_time, std::string task, double now);
  /// It belongs to a group. Throws an Error if the members are not ranks, or differ from those that another rank has
  /// reported.
  void join(int rank, std::uint64_t group, const std::vector<int>& members, double now);
  /// It no longer uses the group.
  void drop(int rank, std::uint64_t group, double now);
  /// Its heartbeat about one group. Throws an Error for a group that it did not join.
  void beat(int rank, const Beat& beat, double now);
  /// Its program ends, normally or with the failure that `reason` describes.
  void leave(int rank, bool failed, const std::string& reason, double now);
  /// A collective failed there, perhaps because of another rank.
  void trouble(int rank, const std::string& reason, double now);
  /// Its connection was closed. `reason` is set if that was because of invalid data from the rank.
  void closed(int rank, const std::string& reason, double now);

  /// This process itself was suspended for a while, so silence of the others until now does not count.
  void forgive(double now);

  /// What has happened, once it is certain; nullopt before. Does not change afterwards.
  const std::optional<std::string>& verdict(double now);

  /// Whether a verdict will follow, though it may not be certain yet.
  bool has_suspicion() const { return !faults_.empty(); }
  /// Whether all ranks have reported that they called the same collectives as `rank`, as far as it has.
  bool has_settled(int rank) const;
  /// Whether all ranks but 0 have left or closed their connection.
  bool all_left() const;
  /// The members of a group; null if no rank has joined it.
  const std::vector<int>* members(std::uint64_t group) const;

  /// The number of calls of a group that are remembered.
  static constexpr std::size_t remembered = Journal::capacity;

 private:
  struct Rank {
    std::string label;
    double heard;
    bool left = false;
    bool closed = false;
    double processor_time = 0;
    double processor_time_at_progress = 0;
    std::string task{};
  };

  struct Variant {
    Call call;
    std::vector<int> ranks;
  };

  struct Slot {
    std::uint64_t number = 0;
    std::vector<Variant> variants{};
  };

  struct Member {
    bool joined = false;
    std::uint64_t started = 0;
    std::optional<Beat::Pending> pending{};
  };

  struct Group {
    std::vector<int> members{};
    std::map<int, Member> states{};  // of each member
    int users = 0;                   // ranks that have joined and not dropped it
    std::vector<Slot> slots = std::vector<Slot>(remembered);
  };

  // In order of priority: of several faults at the same time, the first kind is the cause of the others.
  enum class Kind { died, failed, diverged, left, silent, late, trouble };

  struct Fault {
    Kind kind;
    double certain;  // the time by which reports that would explain it better have arrived
    std::vector<int> ranks;
    std::string text;
  };

  std::string label(int rank) const;
  std::string name(const Group& group, std::uint64_t number, const Call& call) const;
  std::vector<int> missing(const Group& group, std::uint64_t number) const;
  void add(Kind kind, double certain, std::vector<int> ranks, std::string text);
  void find_divergence(std::uint64_t id, const Group& group, const Slot& slot, double now);
  void find_silent(double now);
  void find_left(double now);
  void find_late(double now);

  Options options_;
  std::vector<Rank> ranks_;
  std::map<std::uint64_t, Group> groups_;
  std::vector<Fault> faults_;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> diverged_;  // group and number
  std::optional<std::string> verdict_;
};

/// "rank 3", "ranks 0 and 1", "ranks 0, 1 and 3"; of more than 20, the first 19 and "… (100 ranks)"
std::string list_ranks(std::vector<int> ranks);

}  // namespace mica::distributed::detail
