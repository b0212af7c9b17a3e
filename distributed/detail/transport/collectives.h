#pragma once

#include <memory>

#include <mica/core/tensor.h>
#include <mica/distributed/detail/transfer.h>
#include <mica/distributed/reduction.h>

namespace mica::distributed::detail {

/// Collectives among the ranks of a group, for tensors on one kind of device. Group has validated the arguments.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) = 0;
  virtual std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) = 0;
  virtual std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) = 0;
  virtual std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) = 0;
};

}  // namespace mica::distributed::detail
