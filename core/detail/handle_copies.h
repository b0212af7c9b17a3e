#pragma once

#include <memory>
#include <unordered_map>

#include <mica/core/tensor.h>

namespace mica::detail {

/// While it exists, handles to certain tensors that this thread copies refer to other tensors instead.
class HandleCopies {
 public:
  /// By tensor, the tensor that copied handles refer to.
  using Map = std::unordered_map<const TensorImpl*, std::shared_ptr<TensorImpl>>;

  /// `copies` must outlive this object and may grow while it exists, but only under a HandleCopies(nullptr).
  explicit HandleCopies(const Map* copies) : copies_(copies), outer_(handle_copies) {
    handle_copies = copies == nullptr ? nullptr : this;
  }
  ~HandleCopies() { handle_copies = outer_; }
  HandleCopies(const HandleCopies&) = delete;
  HandleCopies& operator=(const HandleCopies&) = delete;

  const Map& copies() const { return *copies_; }

 private:
  const Map* copies_;
  const HandleCopies* outer_;
};

}  // namespace mica::detail
