#pragma once

#include <memory>

namespace mica::distributed::detail {

/// A collective that was started.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait() = 0;  ///< see Work::wait()
  /// Whether this rank's part is done; true if that is not known. A transfer that takes too long is reported. May be
  /// called on any thread.
  virtual bool ended() const { return true; }
  /// For a collective that was captured in a CUDA graph: call it after the launch of a replay, with the replay's stream
  /// as the current one. Returns the collective of this replay.
  virtual std::shared_ptr<Transfer> replayed() { return nullptr; }
};

}  // namespace mica::distributed::detail
