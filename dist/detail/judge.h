#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <mica/dist/detail/journal.h>

namespace mica::dist::detail {

/// Decides on rank 0, from what the ranks report, whether one of them has failed, and which. All times are seconds on
/// one clock. A pure function of the calls made to it.
class Judge {
 public:
  struct Options {
    double beat = 1;         ///< between two reports of a rank
    double silence = 10;     ///< a rank not heard of for that long hangs or has lost its link
    double collective = 20;  ///< a rank that others wait for longer in a collective hangs; 0: never
  };

  /// `labels` names process and machine of each rank.
  Judge(std::vector<std::string> labels, const Options& options, double now);

  void set_collective_timeout(double seconds) { options_.collective = seconds; }

  // What rank reports. Each also says that it lives.

  /// It lives, and has used so much processor time. While it has a `task`, others wait for it as long as it takes.
  void alive(int rank, double processor_time, std::string task, double now);
  /// It belongs to a group. Throws an Error if the members are not ranks, or differ from what another rank has said.
  void join(int rank, std::uint64_t group, const std::vector<int>& members, double now);
  /// It uses the group no more.
  void drop(int rank, std::uint64_t group, double now);
  /// Throws an Error for a group that it did not join.
  void beat(int rank, const Beat& beat, double now);
  /// Its program ends without a fault, or with one that `reason` describes.
  void leave(int rank, bool failed, const std::string& reason, double now);
  /// A collective failed there, perhaps because of another rank.
  void trouble(int rank, const std::string& reason, double now);
  /// Its connection has closed. `reason` says more if it was closed for what the rank sent.
  void closed(int rank, const std::string& reason, double now);

  /// This process was stopped for a while: nobody could be heard.
  void forgive(double now);

  /// What has happened, once it is certain. From then on, the same.
  const std::optional<std::string>& verdict(double now);

  /// Whether all ranks but 0 have left or closed their connection.
  bool all_left() const;
  /// Members of a group that some rank has joined; null: there is none.
  const std::vector<int>* members(std::uint64_t group) const;

  /// Calls that are remembered of a group.
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
    int users = 0;                   // who have joined and not dropped it
    std::vector<Slot> slots = std::vector<Slot>(remembered);
  };

  // The gravest first: of several faults at a time, it is the cause of the others.
  enum class Kind { died, failed, diverged, left, silent, late, trouble };

  struct Fault {
    Kind kind;
    double certain;  // when other reports that could explain it better have come
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

/// "rank 3", "ranks 0 and 1", "ranks 0, 1 and 3"
std::string list_ranks(std::vector<int> ranks);

}  // namespace mica::dist::detail
