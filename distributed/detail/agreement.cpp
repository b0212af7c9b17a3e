#include <algorithm>
#include <map>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/distributed/detail/agreement.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>

namespace mica::distributed::detail {

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

std::uint64_t mixed(std::uint64_t h) {
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9U;  // splitmix64
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebU;
  return h ^ (h >> 31);
}

// `count` words of x's memory as a tensor, starting at byte `byte`, which must be aligned for `dtype`.
Tensor words_of(const Tensor& x, DType dtype, std::size_t byte, std::int64_t count) {
  auto impl = std::make_shared<mica::detail::TensorImpl>(*x.handle());
  impl->shape = {count};
  impl->strides = {1};
  impl->offset =
      (x.handle()->offset * static_cast<std::int64_t>(size_of(x.dtype())) + static_cast<std::int64_t>(byte)) /
      static_cast<std::int64_t>(size_of(dtype));
  impl->numel = count;
  impl->dtype = dtype;
  impl->contiguous = true;
  impl->base = nullptr;
  impl->slot = nullptr;
  return Tensor(std::move(impl));
}

// Hashes of tensors' elements, computed on their device: the sum of the words, each multiplied by a random odd number,
// modulo 2^64. Different bits give the same hash with a probability of about 2^-63.
Integers checksums(const nn::NamedTensors& tensors) {
  const autograd::NoGrad guard;
  constexpr std::int64_t chunk = 1 << 20;  // words; bounds the memory for the products
  std::map<int, Tensor> weights_of;        // by number of the GPU
  const auto weights_on = [&](Device device) {
    Tensor& weights = weights_of[device.is_cuda() ? device.index : -1];
    if (!weights.defined()) {
      std::vector<std::int64_t> values(chunk);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<std::int64_t>(mixed((i + 1) * 0x9e3779b97f4a7c15U) | 1U);
      }
      weights = from_data(values, {chunk}, device);
    }
    return weights;
  };
  std::vector<Tensors> sums;
  for (const auto& [name, tensor] : tensors) {
    Tensor x = contiguous_data(tensor.detach());
    if (x.handle()->offset * size_of(x.dtype()) % sizeof(std::int32_t) != 0) {
      const Tensor moved = empty_like(x);
      copy_into(moved, x);
      x = moved;
    }
    Tensors& own = sums.emplace_back();
    const auto add = [&](DType dtype, std::size_t byte, std::int64_t count) {
      const Tensor weights = as_strided(weights_on(x.device()), {count}, {1}, 0);
      own.push_back(sum(mul(words_of(x, dtype, byte, count).to(int64), weights)));
    };
    const std::size_t whole = x.bytes() / sizeof(std::int32_t) * sizeof(std::int32_t);
    for (std::size_t byte = 0; byte < whole; byte += chunk * sizeof(std::int32_t)) {
      add(int32, byte, std::min<std::int64_t>(chunk, static_cast<std::int64_t>((whole - byte) / sizeof(std::int32_t))));
    }
    if (whole < x.bytes()) {
      add(uint8, whole, static_cast<std::int64_t>(x.bytes() - whole));
    }
  }
  // Read only after all were launched, so that the host waits for a GPU once.
  Integers hashes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::uint64_t hash = tensors[i].second.bytes();
    for (const Tensor& part : sums[i]) {
      hash = mixed(hash + static_cast<std::uint64_t>(to_vector<std::int64_t>(part)[0])) * 0x9e3779b97f4a7c15U;
    }
    hashes.push_back(static_cast<std::int64_t>(hash));
  }
  return hashes;
}

struct Outlier {
  int rank;
  int other;  // one of the majority
};

// A rank whose value number i differs from that of the majority; rank −1 if all are equal.
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
  Integers own = checksums(tensors);
  own.insert(own.begin(), step);
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

void check_no_fault(const char* who, const Group& group, std::int64_t step, const std::string& fault, Device device) {
  const std::vector<Integers> ranks = gather_rows<std::int64_t>(group, {fault.empty() ? 0 : 1}, device);
  const auto found = std::find(ranks.begin(), ranks.end(), Integers{1});
  if (found != ranks.end()) {
    const int rank = static_cast<int>(found - ranks.begin());
    fail("{}: at step {}, on rank {}, {}", who, step, rank, broadcast_text(group, fault, rank, device));
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

}  // namespace mica::distributed::detail
