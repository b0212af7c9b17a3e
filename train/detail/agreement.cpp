#include <cstdint>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/train/detail/agreement.h>

namespace mica::train::detail {

std::vector<bool> true_on_any(const distributed::Group& group, const std::vector<bool>& conditions) {
  if (group.size() == 1) {
    return conditions;
  }
  const std::vector<std::uint8_t> own(conditions.begin(), conditions.end());
  const Tensor any = from_data(own, {static_cast<std::int64_t>(own.size())});
  group.all_reduce(any, distributed::Reduction::max);
  const std::vector<std::uint8_t> all = to_vector<std::uint8_t>(any);
  return {all.begin(), all.end()};
}

std::vector<int> ranks_where(const distributed::Group& group, bool condition) {
  const Tensor own = full({1}, condition ? 1 : 0, uint8), of_ranks = empty({group.size()}, uint8);
  group.all_gather(own, of_ranks);
  const std::vector<std::uint8_t> values = to_vector<std::uint8_t>(of_ranks);
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (values[rank] != 0) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::string broadcast(const distributed::Group& group, std::string text) {
  const Tensor size = from_data({static_cast<std::int64_t>(text.size())}, Shape{});
  group.broadcast(size);
  text.resize(static_cast<std::size_t>(size.item()));
  std::vector<std::uint8_t> bytes(text.begin(), text.end());
  const Tensor shared = from_data(bytes, {static_cast<std::int64_t>(bytes.size())});
  group.broadcast(shared);
  bytes = to_vector<std::uint8_t>(shared);
  return {bytes.begin(), bytes.end()};
}

}  // namespace mica::train::detail
