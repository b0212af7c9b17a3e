#pragma once

#include <functional>
#include <memory>

#include <mica/distributed/group.h>

namespace mica::distributed::detail {

/// A collective that was started.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait() = 0;  ///< see Work::wait()
  /// Whether this rank's part is done; true if that is not known. Transfers that take too long are reported. May be
  /// called on any thread.
  virtual bool ended() const { return true; }
};

/// Collectives among the ranks of a group, for tensors on one kind of device. Group has validated the arguments.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) = 0;
  virtual std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) = 0;
  virtual std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) = 0;
  virtual std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) = 0;
};

class Control;
class Journal;

/// The state shared by all handles of a group.
struct GroupState {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Control> control{};   ///< null for a group of one that is not part of a larger one
  std::shared_ptr<Journal> journal{};   ///< null if `control` is
  std::shared_ptr<Collectives> cpu{};   ///< null: no collectives for tensors on the CPU
  std::shared_ptr<Collectives> cuda{};  ///< null: none for tensors on a GPU
  std::function<void()> barrier{};      ///< this and `split`: null for a group of one
  std::function<std::shared_ptr<const GroupState>(int color, int key)> split{};
};

}  // namespace mica::distributed::detail
