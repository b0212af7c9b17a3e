#include <algorithm>
#include <set>
#include <utility>

#include <mica/core/check.h>
#include <mica/distributed/detail/health/failure_detector.h>

namespace mica::distributed::detail {

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

Judge::Judge(std::vector<std::string> labels, const Options& options, double now) : options_(options) {
  for (std::string& label : labels) {
    ranks_.push_back({.label = std::move(label), .heard = now});
  }
}

std::string Judge::label(int rank) const { return fmt::format("rank {} ({})", rank, ranks_[rank].label); }

std::string Judge::name(const Group& group, std::uint64_t number, const Call& call) const {
  const bool all = group.members.size() == ranks_.size();
  return fmt::format("{}, collective {}{}", describe(call), number,
                     all ? "" : " of the group of " + list_ranks(group.members));
}

void Judge::alive(int rank, double processor_time, std::string task, double now) {
  ranks_[rank].heard = now;
  ranks_[rank].processor_time = processor_time;
  ranks_[rank].task = std::move(task);
}

void Judge::join(int rank, std::uint64_t id, const std::vector<int>& members, double now) {
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

void Judge::drop(int rank, std::uint64_t id, double now) {
  ranks_[rank].heard = now;
  const auto found = groups_.find(id);
  check(found != groups_.end() && found->second.states.contains(rank) && found->second.states[rank].joined,
        "the end of a group that it did not join");
  found->second.states[rank].joined = false;
  if (--found->second.users == 0) {
    groups_.erase(found);
  }
}

void Judge::beat(int rank, const Beat& beat, double now) {
  ranks_[rank].heard = now;
  const auto found = groups_.find(beat.group);
  check(found != groups_.end() && found->second.states.contains(rank) && found->second.states[rank].joined &&
            beat.calls.size() <= remembered && beat.first + beat.calls.size() == beat.started,
        "a report of a group that it did not join, or one that contradicts itself");
  Group& group = found->second;
  Member& member = group.states[rank];
  const auto number_of = [](const std::optional<Beat::Pending>& pending) {
    return pending ? std::optional(pending->number) : std::nullopt;
  };
  if (member.started != beat.started || number_of(member.pending) != number_of(beat.pending)) {
    ranks_[rank].processor_time_at_progress = ranks_[rank].processor_time;
  }
  member.started = beat.started;
  member.pending = beat.pending;
  for (std::size_t i = 0; i < beat.calls.size(); ++i) {
    const std::uint64_t number = beat.first + i;
    Slot& slot = group.slots[number % remembered];
    if (slot.variants.empty() || slot.number < number) {
      slot = {.number = number, .variants = {}};
    } else if (slot.number > number) {
      continue;  // no longer remembered
    }
    const auto same = std::find_if(slot.variants.begin(), slot.variants.end(),
                                   [&](const Variant& variant) { return variant.call == beat.calls[i]; });
    if (same != slot.variants.end()) {
      same->ranks.push_back(rank);
    } else {
      slot.variants.push_back({.call = beat.calls[i], .ranks = {rank}});
    }
    if (slot.variants.size() > 1) {
      find_divergence(beat.group, group, slot, now);
    }
  }
}

void Judge::leave(int rank, bool failed, const std::string& reason, double now) {
  ranks_[rank].heard = now;
  ranks_[rank].left = true;
  if (failed) {
    add(Kind::failed, now + 0.2, {rank}, fmt::format("{} failed: {}", label(rank), reason));
  }
}

void Judge::trouble(int rank, const std::string& reason, double now) {
  ranks_[rank].heard = now;
  add(Kind::trouble, now + 1.5 * options_.beat, {rank}, fmt::format("{} failed: {}", label(rank), reason));
}

void Judge::closed(int rank, const std::string& reason, double now) {
  if (!ranks_[rank].left && !ranks_[rank].closed) {
    add(Kind::died, now + 0.2, {rank},
        reason.empty() ? fmt::format("{} died: its connection was closed without a goodbye", label(rank))
                       : fmt::format("{} failed: it sent {}", label(rank), reason));
  }
  ranks_[rank].closed = true;
}

void Judge::forgive(double now) {
  for (Rank& rank : ranks_) {
    rank.heard = now;
  }
}

bool Judge::has_settled(int rank) const {
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

bool Judge::all_left() const {
  return std::all_of(ranks_.begin() + 1, ranks_.end(), [](const Rank& rank) { return rank.left || rank.closed; });
}

const std::vector<int>* Judge::members(std::uint64_t group) const {
  const auto found = groups_.find(group);
  return found == groups_.end() ? nullptr : &found->second.members;
}

// The ranks that have not started a collective.
std::vector<int> Judge::missing(const Group& group, std::uint64_t number) const {
  std::vector<int> result;
  for (const auto& [rank, state] : group.states) {
    if (state.started <= number) {
      result.push_back(rank);
    }
  }
  return result;
}

// Adds a fault, unless one of the same kind and ranks is already known.
void Judge::add(Kind kind, double certain, std::vector<int> ranks, std::string text) {
  for (const Fault& fault : faults_) {
    if (fault.kind == kind && fault.ranks == ranks) {
      return;
    }
  }
  faults_.push_back({.kind = kind, .certain = certain, .ranks = std::move(ranks), .text = std::move(text)});
}

void Judge::find_divergence(std::uint64_t id, const Group& group, const Slot& slot, double now) {
  if (diverged_ && *diverged_ != std::pair(id, slot.number)) {
    return;  // after the first difference, later calls differ as a consequence
  }
  diverged_ = {id, slot.number};
  std::vector<const Variant*> variants;
  for (const Variant& variant : slot.variants) {
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
  const bool all = group.members.size() == ranks_.size();
  text = fmt::format("the ranks diverged: as collective {}{}, {}", slot.number,
                     all ? "" : " of the group of " + list_ranks(group.members), text);
  for (Fault& fault : faults_) {
    if (fault.kind == Kind::diverged) {
      fault.text = text;
      return;
    }
  }
  add(Kind::diverged, now + 1.5 * options_.beat, ranks, text);
}

void Judge::find_silent(double now) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Rank& state = ranks_[rank];
    // A rank that has left still reports until MPI has ended, and the others wait for that.
    if (!state.closed && now - state.heard > options_.silence) {
      add(Kind::silent, now + 0.2, {static_cast<int>(rank)},
          fmt::format("{} has not been heard of for {:g} s: it hangs, or has lost its link",
                      label(static_cast<int>(rank)), options_.silence));
    }
  }
}

void Judge::find_left(double now) {
  for (const auto& [id, group] : groups_) {
    for (const auto& [rank, state] : group.states) {
      if (!state.pending) {
        continue;
      }
      for (const int late : missing(group, state.pending->number)) {
        if (ranks_[late].left) {
          add(Kind::left, now + 0.2, {late},
              fmt::format("{} has left: its program ended before {}, in which others wait for it", label(late),
                          name(group, state.pending->number, state.pending->call)));
        }
      }
    }
  }
}

void Judge::find_late(double now) {
  if (options_.collective <= 0) {
    return;
  }
  // A rank that is itself waiting is late because of another rank.
  std::set<int> waiting, late;
  for (const auto& [id, group] : groups_) {
    for (const auto& [rank, state] : group.states) {
      if (!state.pending) {
        continue;
      }
      const std::vector<int> absent = missing(group, state.pending->number);
      if (state.pending->seconds >= options_.collective / 2 && !absent.empty()) {
        waiting.insert(rank);
      }
      if (state.pending->seconds >= options_.collective) {
        late.insert(absent.begin(), absent.end());
      }
    }
  }
  const bool busy = std::any_of(late.begin(), late.end(), [&](int rank) { return !ranks_[rank].task.empty(); });
  std::set<int> guilty;
  std::set_difference(late.begin(), late.end(), waiting.begin(), waiting.end(), std::inserter(guilty, guilty.begin()));
  const bool circle = guilty.empty() && !busy;
  // Ranks may wait for each other through several groups. First look for a collective for which all missing ranks are
  // at fault: it describes the fault best.
  for (const bool direct : {true, false}) {
    for (const auto& [id, group] : groups_) {
      // The collective of the group in which ranks have waited longest.
      std::optional<Beat::Pending> first;
      for (const auto& [rank, state] : group.states) {
        if (state.pending && state.pending->seconds >= options_.collective &&
            (!first || state.pending->number < first->number)) {
          first = state.pending;
        }
      }
      if (!first) {
        continue;
      }
      std::vector<int> waiters;
      for (const auto& [rank, state] : group.states) {
        if (state.pending && state.pending->number == first->number) {
          waiters.push_back(rank);
        }
      }
      const std::string what = name(group, first->number, first->call);
      const std::string more =
          fmt::format("for {:g} s. If that is no fault, set MICA_DIST_TIMEOUT to more seconds", options_.collective);
      const std::vector<int> absent = missing(group, first->number);
      const bool all_guilty =
          std::all_of(absent.begin(), absent.end(), [&](int rank) { return guilty.contains(rank); });
      if (all_guilty != direct) {
        continue;
      }
      if (absent.empty()) {
        if (late.empty()) {
          add(Kind::late, now + 0.2, waiters,
              fmt::format("{} did not end on {}, though all of its ranks have started it, {}", what,
                          list_ranks(waiters), more));
        }
        continue;
      }
      for (const int rank : absent) {
        const Rank& state = ranks_[rank];
        if ((circle || guilty.contains(rank)) && state.task.empty()) {
          add(Kind::late, now + 0.2, {rank},
              fmt::format(
                  "{} {}has not come to {}; it used {:.1f} s of processor time since its last collective, and {} "
                  "waited {}",
                  label(rank), circle ? "waits in another collective and " : "", what,
                  state.processor_time - state.processor_time_at_progress, list_ranks(waiters), more));
        }
      }
    }
  }
}

const std::optional<std::string>& Judge::verdict(double now) {
  if (verdict_) {
    return verdict_;
  }
  find_silent(now);
  find_left(now);
  find_late(now);
  const Fault* gravest = nullptr;
  bool certain = false;
  for (const Fault& fault : faults_) {
    certain = certain || fault.certain <= now;
    if (gravest == nullptr || fault.kind < gravest->kind) {
      gravest = &fault;
    }
  }
  if (!certain) {
    return verdict_;
  }
  std::string text;
  for (const Fault& fault : faults_) {
    if (fault.kind == gravest->kind) {
      text += (text.empty() ? "" : "; ") + fault.text;
    }
  }
  verdict_ = text;
  return verdict_;
}

}  // namespace mica::distributed::detail
