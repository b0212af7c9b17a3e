#pragma once

// Observers of kernel launches, and the one that tests use. Host code without CUDA headers, so that builds without
// CUDA, which launch nothing, can include it.

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <mica/core/detail/nesting.h>

namespace mica::cuda {

/// Notified of every kernel that its thread launches while the observer exists. Without observers, a launch costs one
/// extra branch. Observers nest: all are notified, the innermost first. If one is destroyed before a later one, or on
/// another thread, the program ends with an error.
class LaunchObserver {
 public:
  LaunchObserver() : outer_(innermost_) { innermost_ = this; }
  virtual ~LaunchObserver() {
    if (innermost_ != this) {
      mica::detail::ended_out_of_order("cuda::LaunchObserver");
    }
    innermost_ = outer_;
  }
  LaunchObserver(const LaunchObserver&) = delete;
  LaunchObserver& operator=(const LaunchObserver&) = delete;

  /// `name` is check_launch()'s argument: the kernel's name, or that of the cuBLAS or CUB call that launches it.
  /// A string literal. Called after the launch, possibly before the kernel has started.
  virtual void launched(const char* name) = 0;

  /// Notifies this thread's observers. Called by check_launch().
  static void notify(const char* name) {
    for (LaunchObserver* observer = innermost_; observer != nullptr; observer = observer->outer_)
      [[unlikely]] { observer->launched(name); }
  }

 private:
  static inline thread_local constinit LaunchObserver* innermost_ = nullptr;
  LaunchObserver* outer_;
};

/// The names of the kernels that this thread launches while the record exists, in order:
///
///     cuda::LaunchRecord record;
///     softmax(x, -1);
///     EXPECT_TRUE(record.has("softmax_registers"));
class LaunchRecord final : public LaunchObserver {
 public:
  void launched(const char* name) override { names_.emplace_back(name); }

  const std::vector<std::string>& names() const { return names_; }
  bool has(std::string_view name) const { return std::find(names_.begin(), names_.end(), name) != names_.end(); }
  /// Each name once, sorted.
  std::set<std::string> unique() const { return {names_.begin(), names_.end()}; }
  void clear() { names_.clear(); }

 private:
  std::vector<std::string> names_;
};

}  // namespace mica::cuda
