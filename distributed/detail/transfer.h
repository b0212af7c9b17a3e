#pragma once

namespace mica::distributed::detail {

/// A collective that was started.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait() = 0;  ///< see Work::wait()
  /// Whether this rank's part is done; true if that is not known. A transfer that takes too long is reported. May be
  /// called on any thread.
  virtual bool ended() const { return true; }
};

}  // namespace mica::distributed::detail
