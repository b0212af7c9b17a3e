#pragma once

// Checks that the ranks of a group train the same model. All ranks must call them together, and get the same result.
// Messages start with `who`; `device` is where the tensors of the check are.

#include <cstdint>
#include <string>
#include <vector>

#include <mica/core/creation.h>
#include <mica/distributed/group.h>
#include <mica/nn/module.h>

namespace mica::distributed::detail {

/// The values of all ranks, by rank. Each rank must pass the same number of values.
template <class T>
std::vector<std::vector<T>> gather_rows(const Group& group, const std::vector<T>& own, Device device = Device::cpu()) {
  const auto count = static_cast<std::int64_t>(own.size());
  const Tensor from = from_data(own, {count}, device);
  const Tensor all = empty({group.size(), count}, from.dtype(), device);
  group.all_gather(from, all);
  const std::vector<T> values = to_vector<T>(all);
  std::vector<std::vector<T>> rows;
  for (std::int64_t rank = 0; rank < group.size(); ++rank) {
    rows.emplace_back(values.begin() + rank * count, values.begin() + (rank + 1) * count);
  }
  return rows;
}

/// Throws an Error that names the first rank whose lines differ from those of rank 0, and the first line that differs.
void check_same_lines(const char* who, const Group& group, const std::vector<std::string>& lines, Device device);

/// A line with the name, dtype and shape of each tensor, for check_same_lines().
std::vector<std::string> described(const char* kind, const nn::NamedTensors& tensors);

/// Throws an Error that names the rank that is at a different step from the others or has different bits in a tensor,
/// and the tensor. Without a majority, the ranks that agree with the lowest rank count as right. Compares hashes that
/// are computed on the tensors' device, with 24 MiB of memory there; waits for a GPU.
void check_same_values(const char* who, const Group& group, std::int64_t step, const nn::NamedTensors& tensors,
                       Device device);

/// Throws an Error that names the first rank whose `fault` is not empty, and that fault.
void check_no_fault(const char* who, const Group& group, std::int64_t step, const std::string& fault, Device device);

/// Copies the tensors of rank 0 to those of all ranks.
void broadcast_all(const Group& group, const Tensors& tensors);

}  // namespace mica::distributed::detail
