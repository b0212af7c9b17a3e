#include <algorithm>
#include <cstring>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/dist/detail/agreement.h>

namespace mica::dist::detail {

namespace {

using Integers = std::vector<std::int64_t>;

std::string broadcast_text(const Group& group, const std::string& text, int root, Device device) {
  const Tensor size = from_data<std::int64_t>({static_cast<std::int64_t>(text.size())}, {1}, device);
  group.broadcast(size, root);
  const auto length = to_vector<std::int64_t>(size)[0];
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(length));
  if (group.rank() == root) {
    bytes.assign(text.begin(), text.end());
  }
  const Tensor all = from_data(bytes, {length}, device);
  group.broadcast(all, root);
  bytes = to_vector<std::uint8_t>(all);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

// A hash of the elements: the same for equal bits only, but for one pair in 2^64.
std::int64_t checksum(const Tensor& x) {
  const Tensor data = contiguous_data(x.detach()).to(Device::cpu());
  const std::byte* const begin = data.raw_data();
  const std::size_t bytes = data.bytes();
  std::uint64_t hash = bytes;
  for (std::size_t i = 0; i < bytes; i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, begin + i, std::min(bytes - i, sizeof word));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15U;  // odd, so that no word is lost: 2^64 divided by the golden ratio
    hash ^= hash >> 32;
  }
  return static_cast<std::int64_t>(hash);
}

struct Outlier {
  int rank;
  int other;  // one of the majority
};

// A rank whose value number i is not that of most ranks; rank −1 if all are equal.
Outlier find_outlier(const std::vector<Integers>& ranks, std::size_t i) {
  const auto votes = [&](std::size_t rank) {
    return std::count_if(ranks.begin(), ranks.end(), [&](const Integers& other) { return other[i] == ranks[rank][i]; });
  };
  std::size_t best = 0;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    if (votes(rank) > votes(best)) {
      best = rank;
    }
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank][i] != ranks[best][i]) {
      return {static_cast<int>(rank), static_cast<int>(best)};
    }
  }
  return {-1, -1};
}

}  // namespace

void check_same_lines(const char* who, const Group& group, const std::vector<std::string>& lines, Device device) {
  std::string text;
  for (const std::string& line : lines) {
    text += line + "\n";
  }
  const std::string first = broadcast_text(group, text, 0, device);
  const std::vector<Integers> differs = gather_rows<std::int64_t>(group, {text != first ? 1 : 0}, device);
  const auto found = std::find(differs.begin(), differs.end(), Integers{1});
  if (found == differs.end()) {
    return;
  }
  const int rank = static_cast<int>(found - differs.begin());
  const std::vector<std::string> right = lines_of(first), wrong = lines_of(broadcast_text(group, text, rank, device));
  std::size_t i = 0;
  while (i < right.size() && i < wrong.size() && right[i] == wrong[i]) {
    ++i;
  }
  fail("{}: the ranks disagree: rank {} has {}, rank 0 has {}", who, rank, i < wrong.size() ? wrong[i] : "nothing more",
       i < right.size() ? right[i] : "nothing more");
}

std::vector<std::string> described(const char* kind, const nn::NamedTensors& tensors) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(fmt::format("{} \"{}\" of {} {}{}", kind, name, tensor.dtype(), tensor.shape(),
                                tensor.requires_grad() ? " that requires a gradient" : ""));
  }
  return lines;
}

void check_same_values(const char* who, const Group& group, std::int64_t step, const nn::NamedTensors& tensors,
                       Device device) {
  Integers own{step};
  for (const auto& [name, tensor] : tensors) {
    own.push_back(checksum(tensor));
  }
  const std::vector<Integers> ranks = gather_rows(group, own, device);
  if (const Outlier found = find_outlier(ranks, 0); found.rank >= 0) {
    fail("{}: the ranks disagree: rank {} is at step {}, rank {} at step {}", who, found.rank, ranks[found.rank][0],
         found.other, ranks[found.other][0]);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const Outlier found = find_outlier(ranks, i + 1); found.rank >= 0) {
      fail("{}: the ranks disagree: at step {}, rank {} has other values in parameter \"{}\" than rank {}", who, step,
           found.rank, tensors[i].first, found.other);
    }
  }
}

void broadcast_all(const Group& group, const Tensors& tensors) {
  const autograd::NoGrad guard;
  std::vector<Tensor> sent;
  std::vector<Work> works;
  for (const Tensor& tensor : tensors) {
    sent.push_back(contiguous_data(tensor));
    works.push_back(group.start_broadcast(sent.back()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    works[i].wait();
    if (!tensors[i].is_contiguous()) {
      copy_into(tensors[i], sent[i]);
      tensors[i].bump_version("broadcast");
    }
  }
}

}  // namespace mica::dist::detail
