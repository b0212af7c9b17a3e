#pragma once

#include <string>
#include <vector>

#include <mica/distributed/group.h>

namespace mica::train::detail {

/// For each condition, whether it is true on any rank.
std::vector<bool> true_on_any(const distributed::Group& group, const std::vector<bool>& conditions);

/// The ranks on which the condition is true.
std::vector<int> ranks_where(const distributed::Group& group, bool condition);

/// Returns rank 0's text on every rank.
std::string broadcast(const distributed::Group& group, std::string text);

}  // namespace mica::train::detail
