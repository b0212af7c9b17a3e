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
struct Slot;       // autograd/slot.h: a tensor's gradient and its place in the graph
class Node;        // autograd/node.h: a recorded op
class HookHandle;  // autograd/hooks.h: takes a hook away again
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
  std::uint32_t rewrites = 0;            // recorded writes in place to it or its views; in a view: those it knows of
  std::shared_ptr<TensorImpl> base;      // in a view that autograd knows as one: what it is a view of, itself none
  std::shared_ptr<autograd::Slot> slot;  // null until autograd has something to remember
};
}  // namespace detail

struct BackwardOptions {
  bool retain_graph = false;  ///< keep saved tensors, so that backward can run again
};

/// A handle to an n-dimensional array. Copying a Tensor copies the handle: both see the same elements.
/// A default-constructed Tensor is undefined: it has no elements and stands for "absent".
///
/// What computes with tensors are free functions (`add`, `matmul`, `layer_norm`, …); the members
/// here say what a tensor is, move it, and take part in autograd.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<detail::TensorImpl> impl) : impl_(std::move(impl)) {}

  bool defined() const { return impl_ != nullptr; }

  const Shape& shape() const { return impl().shape; }
  const Strides& strides() const { return impl().strides; }
  int dim() const { return impl().shape.size(); }
  /// Length of an axis; negative axes count from the last.
  std::int64_t size(std::int64_t axis) const { return shape()[normalize_axis(axis, dim(), "size")]; }
  std::int64_t numel() const { return impl().numel; }
  DType dtype() const { return impl().dtype; }
  Device device() const { return impl().storage->device(); }
  bool is_contiguous() const { return impl().contiguous; }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype()); }

  /// Pointer to the first element, on the tensor's device. T must be the tensor's dtype.
  /// Writing through it is not seen by autograd: call bump_version() after.
  template <class T>
  T* data() const {
    check(dtype_of<T> == dtype(), "data: asked for {} elements of a tensor of {}", dtype_of<T>, dtype());
    return reinterpret_cast<T*>(raw_data());
  }
  /// The same, or null for an undefined tensor.
  template <class T>
  T* data_or_null() const {
    return defined() ? data<T>() : nullptr;
  }
  std::byte* raw_data() const { return impl().storage->data() + impl().offset * size_of(dtype()); }

  /// The value of a tensor of one element, of any dtype and device.
  double item() const;

  /// A copy on another device or of another dtype; itself where nothing changes. Differentiable.
  Tensor to(Device device) const;
  Tensor to(DType dtype) const;
  Tensor to(Device device, DType dtype) const;

  /// Writes in place so far, to this tensor or to one that shares its storage; always 0 if is_inference().
  std::uint32_t version() const { return impl().storage->version(); }
  /// Counts one; errors about what was saved before name the writer, which must be a literal or live as long.
  void bump_version(const char* writer = "bump_version") const { impl().storage->bump_version(writer); }
  /// True if the elements were allocated in inference mode (autograd/grad_mode.h).
  bool is_inference() const { return !impl().storage->counts_writes(); }

  // Autograd. Defined in autograd/tensor.cpp.

  /// True if operations on this tensor are recorded (while gradients are enabled).
  bool requires_grad() const;
  /// Makes a leaf ask for a gradient (or not). Throws for dtypes that are not floating, for computed tensors and,
  /// outside of inference mode, for tensors made in it.
  const Tensor& requires_grad_(bool on = true) const;
  /// True if no recorded op made this tensor.
  bool is_leaf() const;
  /// The gradient that backward() has accumulated into this leaf; undefined where there is none.
  Tensor grad() const;
  /// Replaces the gradient; an undefined tensor removes it. If `grad` has a history, it is left behind, as it may lead
  /// back to this tensor. Throws unless shape, dtype and device are this tensor's.
  void set_grad(const Tensor& grad) const;
  /// Adds to each leaf's grad the gradient of this tensor, times `gradient` (which a scalar may leave out).
  void backward(const Tensor& gradient = {}, BackwardOptions options = {}) const;
  /// The same elements without history, and without learning of histories that either gets later. Shares storage and
  /// version, so a write in place to one is seen in the other and found out by what saved it.
  Tensor detach() const;
  /// Makes this leaf, and so every handle to it, refer to the elements of `data`, of any dtype and device but of its
  /// shape: how a parameter moves while all who hold it follow. Keeps requires_grad and hooks, removes the gradient;
  /// a graph that saved the old elements raises in its backward.
  void set_data(const Tensor& data) const;
  /// The recorded op that made this tensor, for hooks of its own; null for leaves.
  std::shared_ptr<autograd::Node> grad_fn() const;

  // Hooks run in the order of registration, in the thread that called backward(), with recording off (on, in grad()
  // with create_graph). An exception in one ends the backward and reaches its caller. What a hook registers is called
  // from the next backward on; what it removes is not called any more. They may be removed on any thread, but not
  // registered while another thread goes backward through this tensor. The gradient they see may be somebody else's
  // memory and must not be written. The tensor keeps its hooks, and so what they captured: one that captures its own
  // tensor, or one computed from it, keeps itself alive; capture a detach() or remove the hook.

  /// Calls `hook` with this tensor's gradient when backward has it complete. A defined result replaces it, and must be
  /// of its shape, dtype and device. Throws if no gradient is required. A hook belongs to the tensor's present value:
  /// if a write in place is recorded later, it sees the gradient of what was there before.
  autograd::HookHandle register_hook(std::function<Tensor(const Tensor& gradient)> hook) const;
  /// Calls `hook` with this leaf when a backward has added to its grad. It may use the grad up: step an optimizer, then
  /// remove it. Throws unless this is a leaf that requires a gradient.
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

/// A new uninitialized row-major tensor.
Tensor empty(const Shape& shape, DType dtype = float32, Device device = Device::cpu());

/// Another look at a tensor's storage: same dtype, no copy, no history. Strides and offset in elements;
/// the offset counts from the start of the storage. The caller answers for staying inside it.
Tensor as_strided(const Tensor& x, const Shape& shape, const Strides& strides, std::int64_t offset);

/// `x` spread over `shape` by strides of 0 on stretched axes: no copy, no history.
Tensor broadcast_view(const Tensor& x, const Shape& shape);

/// Values, shape, dtype, device and whether it carries a gradient; long axes are abbreviated.
std::string to_string(const Tensor& x);
std::ostream& operator<<(std::ostream& out, const Tensor& x);

}  // namespace mica
