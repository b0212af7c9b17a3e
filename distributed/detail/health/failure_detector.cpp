#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include <mica/core/check.h>
#include <mica/distributed/detail/health/failure_detector.h>

namespace mica::distributed::detail {

namespace {

constexpr double grace = 0.2;  // seconds in which reports of the cause may still arrive

}  // namespace

std::string list_ranks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  constexpr std::size_t most = 20;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks.size() > most && i + 1 == most) {
      return text + fmt::format(", … ({} ranks)", ranks.size());
    }
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  }
  return text;
}

FailureDetector::FailureDetector(std::vector<std::string> labels, const Options& options, double now)
    : options_(options) {
  for (std::string& label : labels) {
    ranks_.push_back({.label = std::move(label), .heard = now});
  }
}

std::string FailureDetector::label(int rank) const { return fmt::format("rank {} ({})", rank, ranks_[rank].label); }

// Names a group that is not the world.
std::string FailureDetector::suffix(const Group& group) const {
  return group.members.size() == ranks_.size() ? "" : " of the group of " + list_ranks(group.members);
}

std::string FailureDetector::name(const Group& group, std::uint64_t number, const Call& call) const {
  return fmt::format("{}, collective {}{}", describe(call), number, suffix(group));
}

void FailureDetector::alive(int rank, double processor_time, std::string task, double now) {
  ranks_[rank].heard = now;
  ranks_[rank].processor_time = processor_time;
  ranks_[rank].task = std::move(task);
}

void FailureDetector::join(int rank, std::uint64_t id, const std::vector<int>& members, double now) {
  ranks_[rank].heard = now;
  check(std::find(members.begin(), members.end(), rank) != members.end() &&
            std::all_of(members.begin(), members.end(),
                        [&](int member) { return member >= 0 && member < static_cast<int>(ranks_.size()); }),
        "a group of ranks that do not exist or are others");
  const auto [found, is_new] = groups_.try_emplace(id);
  Group& group = found->second;
  if (is_new) {
    group.members = members;
    for (const int member : members) {
      group.states[member];
    }
  }
  check(group.members == members && !group.states[rank].joined, "a group that differs from what other ranks say");
  group.states[rank].joined = true;
  ++group.users;
}

void FailureDetector::drop(int rank, std::uint64_t id, double now) {
  ranks_[rank].heard = now;
  const auto found = groups_.find(id);
  check(found != groups_.end() && found->second.states.contains(rank) && found->second.states[rank].joined,
        "the end of a group that it did not join");
  found->second.states[rank].joined = false;
  if (--found->second.users == 0) {
    groups_.erase(found);
  }
}

void FailureDetector::heartbeat(int rank, const Heartbeat& heartbeat, double now) {
  ranks_[rank].heard = now;
  const auto found = groups_.find(heartbeat.group);
  check(found != groups_.end() && found->second.states.contains(rank) && found->second.states[rank].joined &&
            heartbeat.calls.size() <= remembered && heartbeat.first + heartbeat.calls.size() == heartbeat.started,
        "a report of a group that it did not join, or one that contradicts itself");
  Group& group = found->second;
  Member& member = group.states[rank];
  const auto number_of = [](const std::optional<Heartbeat::Pending>& pending) {
    return pending ? std::optional(pending->number) : std::nullopt;
  };
  if (member.started != heartbeat.started || number_of(member.pending) != number_of(heartbeat.pending)) {
    ranks_[rank].processor_time_at_progress = ranks_[rank].processor_time;
  }
  member.started = heartbeat.started;
  member.pending = heartbeat.pending;
  record(rank, heartbeat, group, now);
}

// Compares the calls with those that other ranks have reported.
void FailureDetector::record(int rank, const Heartbeat& heartbeat, Group& group, double now) {
  for (std::size_t i = 0; i < heartbeat.calls.size(); ++i) {
    const std::uint64_t number = heartbeat.first + i;
    Reported& reported = group.reported[number % remembered];
    if (reported.variants.empty() || reported.number < number) {
      reported = {.number = number, .variants = {}};
    } else if (reported.number > number) {
      continue;  // no longer remembered
    }
    const auto same = std::find_if(reported.variants.begin(), reported.variants.end(),
                                   [&](const Variant& variant) { return variant.call == heartbeat.calls[i]; });
    if (same != reported.variants.end()) {
      same->ranks.push_back(rank);
    } else {
      reported.variants.push_back({.call = heartbeat.calls[i], .ranks = {rank}});
    }
    if (reported.variants.size() > 1) {
      suspect_divergence(heartbeat.group, group, reported, now);
    }
  }
}

void FailureDetector::leave(int rank, bool failed, const std::string& reason, double now) {
  ranks_[rank].heard = now;
  ranks_[rank].left = true;
  if (failed) {
    suspect(Kind::failed, now + grace, {rank}, fmt::format("{} failed: {}", label(rank), reason));
  }
}

void FailureDetector::error(int rank, const std::string& reason, double now) {
  ranks_[rank].heard = now;
  suspect(Kind::error, now + 1.5 * options_.heartbeat_interval, {rank},
          fmt::format("{} failed: {}", label(rank), reason));
}

void FailureDetector::closed(int rank, const std::string& reason, double now) {
  if (!ranks_[rank].left && !ranks_[rank].closed) {
    suspect(Kind::died, now + grace, {rank},
            reason.empty() ? fmt::format("{} died: its connection was closed without a goodbye", label(rank))
                           : fmt::format("{} failed: it sent {}", label(rank), reason));
  }
  ranks_[rank].closed = true;
}

void FailureDetector::restart_silence(double now) {
  for (Rank& rank : ranks_) {
    rank.heard = now;
  }
}

bool FailureDetector::has_confirmed(int rank) const {
  for (const auto& [id, group] : groups_) {
    const auto own = group.states.find(rank);
    for (const auto& [other, state] : group.states) {
      if (own != group.states.end() && state.started < own->second.started && !ranks_[other].left &&
          !ranks_[other].closed) {
        return false;
      }
    }
  }
  return !has_suspicion();
}

bool FailureDetector::all_left() const {
  return std::all_of(ranks_.begin() + 1, ranks_.end(), [](const Rank& rank) { return rank.left || rank.closed; });
}

const std::vector<int>* FailureDetector::members(std::uint64_t group) const {
  const auto found = groups_.find(group);
  return found == groups_.end() ? nullptr : &found->second.members;
}

// The ranks that have not started a collective.
std::vector<int> FailureDetector::missing(const Group& group, std::uint64_t number) const {
  std::vector<int> result;
  for (const auto& [rank, state] : group.states) {
    if (state.started <= number) {
      result.push_back(rank);
    }
  }
  return result;
}

// Adds a suspicion, unless there is one of the same kind and ranks.
void FailureDetector::suspect(Kind kind, double certain, std::vector<int> ranks, std::string text) {
  for (const Suspicion& known : suspicions_) {
    if (known.kind == kind && known.ranks == ranks) {
      return;
    }
  }
  suspicions_.push_back({.kind = kind, .certain = certain, .ranks = std::move(ranks), .text = std::move(text)});
}

void FailureDetector::suspect_divergence(std::uint64_t id, const Group& group, const Reported& reported, double now) {
  if (diverged_ && *diverged_ != std::pair(id, reported.number)) {
    return;  // after the first difference, later calls differ as a consequence
  }
  diverged_ = {id, reported.number};
  std::vector<const Variant*> variants;
  for (const Variant& variant : reported.variants) {
    variants.push_back(&variant);
  }
  // Variants with the fewest ranks come first.
  std::stable_sort(variants.begin(), variants.end(),
                   [](const Variant* a, const Variant* b) { return a->ranks.size() < b->ranks.size(); });
  std::string text;
  std::vector<int> ranks;
  for (const Variant* const variant : variants) {
    text +=
        fmt::format("{}{} called {}", text.empty() ? "" : ", ", list_ranks(variant->ranks), describe(variant->call));
    ranks.insert(ranks.end(), variant->ranks.begin(), variant->ranks.end());
  }
  text = fmt::format("the ranks diverged: as collective {}{}, {}", reported.number, suffix(group), text);
  for (Suspicion& known : suspicions_) {
    if (known.kind == Kind::diverged) {
      known.text = text;
      return;
    }
  }
  suspect(Kind::diverged, now + 1.5 * options_.heartbeat_interval, ranks, text);
}

void FailureDetector::suspect_silent(double now) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Rank& state = ranks_[rank];
    // A rank that has left still reports until MPI has ended, and the others wait for that.
    if (!state.closed && now - state.heard > options_.heartbeat_timeout) {
      suspect(Kind::silent, now + grace, {static_cast<int>(rank)},
              fmt::format("{} has not been heard of for {:g} s: it hangs, or has lost its link",
                          label(static_cast<int>(rank)), options_.heartbeat_timeout));
    }
  }
}

void FailureDetector::suspect_left(double now) {
  for (const auto& [id, group] : groups_) {
    for (const auto& [rank, state] : group.states) {
      if (!state.pending) {
        continue;
      }
      for (const int late : missing(group, state.pending->number)) {
        if (ranks_[late].left) {
          suspect(Kind::left, now + grace, {late},
                  fmt::format("{} has left: its program ended before {}, in which others wait for it", label(late),
                              name(group, state.pending->number, state.pending->call)));
        }
      }
    }
  }
}

// A rank that waits in a collective itself is late because of another one.
FailureDetector::Waits FailureDetector::find_waits() const {
  Waits waits;
  std::set<int> waiting;
  for (const auto& [id, group] : groups_) {
    for (const auto& [rank, state] : group.states) {
      if (!state.pending) {
        continue;
      }
      const std::vector<int> absent = missing(group, state.pending->number);
      if (state.pending->seconds >= options_.collective_timeout / 2 && !absent.empty()) {
        waiting.insert(rank);
      }
      if (state.pending->seconds >= options_.collective_timeout) {
        waits.late.insert(absent.begin(), absent.end());
      }
    }
  }
  std::set_difference(waits.late.begin(), waits.late.end(), waiting.begin(), waiting.end(),
                      std::inserter(waits.culprits, waits.culprits.begin()));
  const bool has_task =
      std::any_of(waits.late.begin(), waits.late.end(), [&](int rank) { return !ranks_[rank].task.empty(); });
  waits.deadlock = waits.culprits.empty() && !has_task;
  return waits;
}

// The first collective of the group in which a rank has waited for longer than the timeout.
std::optional<Heartbeat::Pending> FailureDetector::first_overdue(const Group& group) const {
  std::optional<Heartbeat::Pending> first;
  for (const auto& [rank, state] : group.states) {
    if (state.pending && state.pending->seconds >= options_.collective_timeout &&
        (!first || state.pending->number < first->number)) {
      first = state.pending;
    }
  }
  return first;
}

void FailureDetector::suspect_late_in(const Group& group, const Heartbeat::Pending& overdue, const Waits& waits,
                                      double now) {
  std::vector<int> waiting;
  for (const auto& [rank, state] : group.states) {
    if (state.pending && state.pending->number == overdue.number) {
      waiting.push_back(rank);
    }
  }
  const std::string what = name(group, overdue.number, overdue.call);
  const std::string how_long = fmt::format("for {:g} s. If that is no fault, set MICA_DIST_TIMEOUT to more seconds",
                                           options_.collective_timeout);
  const std::vector<int> absent = missing(group, overdue.number);
  if (absent.empty() && waits.late.empty() && !overdue.replay) {
    suspect(Kind::late, now + grace, waiting,
            fmt::format("{} did not end on {}, though all of its ranks have started it, {}", what, list_ranks(waiting),
                        how_long));
  }
  for (const int rank : absent) {
    const Rank& state = ranks_[rank];
    if ((waits.deadlock || waits.culprits.contains(rank)) && state.task.empty()) {
      suspect(Kind::late, now + grace, {rank},
              fmt::format("{} {}has not come to {}; it used {:.1f} s of processor time since its last collective, and "
                          "{} waited {}",
                          label(rank), waits.deadlock ? "waits in another collective and " : "", what,
                          state.processor_time - state.processor_time_at_progress, list_ranks(waiting), how_long));
    }
  }
}

// Ranks may wait for each other through several groups. Collectives for which only culprits are missing describe the
// fault best, so they come first.
void FailureDetector::suspect_late(double now) {
  if (options_.collective_timeout <= 0) {
    return;
  }
  const Waits waits = find_waits();
  for (const bool only_culprits : {true, false}) {
    for (const auto& [id, group] : groups_) {
      const std::optional<Heartbeat::Pending> overdue = first_overdue(group);
      if (!overdue) {
        continue;
      }
      const std::vector<int> absent = missing(group, overdue->number);
      if (std::all_of(absent.begin(), absent.end(), [&](int rank) { return waits.culprits.contains(rank); }) ==
          only_culprits) {
        suspect_late_in(group, *overdue, waits, now);
      }
    }
  }
}

const std::optional<std::string>& FailureDetector::failure(double now) {
  if (failure_) {
    return failure_;
  }
  suspect_silent(now);
  suspect_left(now);
  suspect_late(now);
  if (std::none_of(suspicions_.begin(), suspicions_.end(),
                   [now](const Suspicion& suspicion) { return suspicion.certain <= now; })) {
    return failure_;
  }
  const Kind cause =
      std::min_element(suspicions_.begin(), suspicions_.end(), [](const Suspicion& a, const Suspicion& b) {
        return a.kind < b.kind;
      })->kind;
  std::string text;
  for (const Suspicion& suspicion : suspicions_) {
    if (suspicion.kind == cause) {
      text += (text.empty() ? "" : "; ") + suspicion.text;
    }
  }
  failure_ = text;
  return failure_;
}

}  // namespace mica::distributed::detail
