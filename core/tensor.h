#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include <mica/core/device.h>
#include <mica/core/dtype.h>
#include <mica/core/shape.h>
#include <mica/core/storage.h>

namespace mica {

class Tensor;
using Tensors = std::vector<Tensor>;

namespace autograd {
struct Slot;       // autograd/detail/slot.h: a tensor's gradient and its history
class Node;        // autograd/node.h: a recorded op
class HookHandle;  // autograd/hooks.h: removes a hook
}  // namespace autograd

namespace detail {
struct TensorImpl {
  std::shared_ptr<Storage> storage;
  Shape shape;
  Strides strides;          // in elements
  std::int64_t offset = 0;  // of the first element in the storage, in elements
  std::int64_t numel = 0;
  DType dtype = DType::float32;
  bool contiguous = true;                // row-major without gaps
  std::uint32_t history_version = 0;     // recorded in-place writes to it or its views; in a view: those it reflects
  std::shared_ptr<TensorImpl> base;      // in a view registered with autograd: its base, which is not a view
  std::shared_ptr<autograd::Slot> slot;  // autograd's data; null until needed
};

/// Null except while nn::clone copies a module on this thread (core/detail/handle_copies.h). A handle that is copied
/// then refers to the copy of its tensor, so that a module can be copied member by member.
class HandleCopies;
extern thread_local constinit const HandleCopies* handle_copies;
std::shared_ptr<TensorImpl> copy_of(const std::shared_ptr<TensorImpl>& handle) noexcept;
}  // namespace detail

struct BackwardOptions {
  bool retain_graph = false;  ///< keep saved tensors, so that backward can run again
};

/// A handle to an n-dimensional array. Copying a Tensor copies the handle: both refer to the same elements. A
/// default-constructed Tensor is undefined and represents an absent tensor.
///
/// Operations are free functions (`add`, `matmul`, `layer_norm`, …). Members are for metadata, access to elements,
/// conversion and autograd.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<detail::TensorImpl> impl) : impl_(std::move(impl)) {}
  Tensor(const Tensor& other) noexcept
      : impl_(detail::handle_copies == nullptr ? other.impl_ : detail::copy_of(other.impl_)) {}
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;
  Tensor& operator=(const Tensor& other) noexcept {  // NOLINT(bugprone-unhandled-self-assignment): shared_ptr does
    if (detail::handle_copies == nullptr) [[likely]] {
      impl_ = other.impl_;
    } else {
      impl_ = detail::copy_of(other.impl_);
    }
    return *this;
  }

  bool defined() const { return impl_ != nullptr; }

  const Shape& shape() const { return impl().shape; }
  const Strides& strides() const { return impl().strides; }  ///< in elements
  int dim() const { return impl().shape.size(); }
  /// Length of an axis; negative axes count from the last.
  std::int64_t size(std::int64_t axis) const { return shape()[normalize_axis(axis, dim(), "size")]; }
  std::int64_t numel() const { return impl().numel; }
  DType dtype() const { return impl().dtype; }
  Device device() const { return impl().storage->device(); }
  bool is_contiguous() const { return impl().contiguous; }  ///< row-major without gaps
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype()); }  ///< of the elements

  /// Pointer to the first element, on the tensor's device. T must match the tensor's dtype. Autograd does not see
  /// writes through the pointer: call bump_version() after them.
  template <class T>
  T* data() const {
    check(dtype_of<T> == dtype(), "data: asked for {} elements of a tensor of {}", dtype_of<T>, dtype());
    return reinterpret_cast<T*>(raw_data());
  }
  /// Like data(), but null for an undefined tensor.
  template <class T>
  T* data_or_null() const {
    return defined() ? data<T>() : nullptr;
  }
  /// Pointer to the first element, untyped. Null if there are no elements, whatever the offset of an empty slice.
  std::byte* raw_data() const {
    std::byte* const begin = impl().storage->data();
    return begin == nullptr ? nullptr : begin + impl().offset * size_of(dtype());
  }

  /// The value of a tensor with one element, of any dtype and device. Throws for any other number of elements, and for
  /// an int64 that a double would round.
  double item() const;

  /// This tensor if it has that device and dtype already; otherwise a converted copy. Differentiable.
  Tensor to(Device device) const;
  Tensor to(DType dtype) const;
  Tensor to(Device device, DType dtype) const;

  /// The number of in-place writes to this tensor's storage; always 0 if is_inference().
  std::uint32_t version() const { return impl().storage->version(); }
  /// Counts one in-place write. `writer` is named in errors about tensors saved earlier; it must have static lifetime.
  void bump_version(const char* writer = "bump_version") const { impl().storage->bump_version(writer); }
  /// True if the storage was allocated in inference mode (autograd/grad_mode.h).
  bool is_inference() const { return !impl().storage->counts_writes(); }

  // Autograd. Defined in autograd/tensor.cpp.

  /// True if ops on this tensor are recorded (while gradients are enabled).
  bool requires_grad() const;
  /// Sets whether a leaf requires a gradient. Throws if the dtype is not floating, if an op computed this tensor or,
  /// outside inference mode, if it was created in it.
  const Tensor& requires_grad_(bool on = true) const;
  /// True if this tensor is not the result of a recorded op.
  bool is_leaf() const;
  /// The gradient that backward() has accumulated into this leaf; undefined if there is none.
  Tensor grad() const;
  /// Replaces the gradient; an undefined tensor removes it. Stores `grad` without its history, which could lead back to
  /// this tensor. Throws unless shape, dtype and device match.
  void set_grad(const Tensor& grad) const;
  /// Adds the gradient of this tensor with respect to each leaf, weighted by `gradient`, to the leaf's grad. A tensor
  /// of one element needs no `gradient`. Throws if no recorded op made this tensor, or if `gradient` does not match.
  void backward(const Tensor& gradient = {}, BackwardOptions options = {}) const;
  /// A tensor without history that shares storage and version with this one: an in-place write to either changes both,
  /// and backward detects it. History recorded later for one does not affect the other.
  Tensor detach() const;
  /// Makes this leaf, and every handle to it, refer to the elements of `data`, which must have the same shape but may
  /// have another dtype and device. Modules move their parameters this way. Keeps requires_grad and hooks and removes
  /// the gradient; the backward of a graph that saved the old elements throws.
  void set_data(const Tensor& data) const;
  /// The recorded op that produced this tensor; null for leaves.
  std::shared_ptr<autograd::Node> grad_fn() const;

  // Hooks run in the order of registration, on the thread that called backward(), with recording off (but on in grad()
  // with create_graph). An exception in a hook ends the backward and propagates to its caller. A hook registered by a
  // hook is called from the next backward on. Hooks may be removed on any thread, but not registered while another
  // thread runs backward through this tensor. The gradient passed to a hook may be shared and must not be written. The
  // tensor owns its hooks and what they capture: a hook that captures its own tensor, or one computed from it, creates
  // a reference cycle. Capture a detach(), or remove the hook.

  /// Calls `hook` with this tensor's gradient once it is complete. A defined result replaces it and must have its
  /// shape, dtype and device. Throws if this tensor does not require a gradient or `hook` is empty. The hook belongs to
  /// the tensor's current value: after a recorded in-place write, it still receives the gradient of the old value.
  autograd::HookHandle register_hook(std::function<Tensor(const Tensor& gradient)> hook) const;
  /// Calls `hook` with this leaf after backward has accumulated into its grad. The hook may use up the grad: step an
  /// optimizer, then remove the grad. Throws if this is not a leaf that requires a gradient, or if `hook` is empty.
  autograd::HookHandle register_post_accumulate_grad_hook(std::function<void(const Tensor& leaf)> hook) const;

  /// True if both are handles to the same tensor.
  bool is_same(const Tensor& other) const { return impl_ == other.impl_; }

  const std::shared_ptr<detail::TensorImpl>& handle() const { return impl_; }

 private:
  detail::TensorImpl& impl() const {
    check(impl_ != nullptr, "tensor: expected a defined tensor, got an undefined one");
    return *impl_;
  }

  std::shared_ptr<detail::TensorImpl> impl_;
};

/// A new uninitialized row-major tensor. Throws OutOfMemory, with no effect.
Tensor empty(const Shape& shape, DType dtype = float32, Device device = Device::cpu());

/// A view of a tensor's storage: same dtype, no copy, no history. Strides and offset are in elements; the offset counts
/// from the start of the storage. Throws unless there is one stride per axis. Bounds are not
/// checked.
Tensor as_strided(const Tensor& x, const Shape& shape, const Strides& strides, std::int64_t offset);

/// `x` broadcast to `shape` with strides of 0: no copy, no history. Throws unless `x` broadcasts to that shape.
Tensor broadcast_view(const Tensor& x, const Shape& shape);

/// Values, shape, dtype, device and whether it requires a gradient; long axes are abbreviated.
std::string to_string(const Tensor& x);
std::ostream& operator<<(std::ostream& out, const Tensor& x);

}  // namespace mica
