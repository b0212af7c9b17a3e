#pragma once

#include <functional>
#include <memory>

#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/transport/collectives.h>

namespace mica::distributed::detail {

/// The state shared by all handles of a group.
struct GroupState {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Coordinator> coordinator{};  ///< null for a group of one that is not part of a larger one
  std::shared_ptr<CollectiveLog> log{};        ///< null if `coordinator` is
  std::shared_ptr<Collectives> cpu{};          ///< null: no collectives for tensors on the CPU
  std::shared_ptr<Collectives> cuda{};         ///< null: none for tensors on a GPU
  std::function<void()> barrier{};             ///< this and `split`: null for a group of one
  std::function<std::shared_ptr<const GroupState>(int color, int key)> split{};
};

}  // namespace mica::distributed::detail
