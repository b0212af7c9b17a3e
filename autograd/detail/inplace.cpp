#include <algorithm>

#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/detail/segment.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>

namespace mica::autograd {

namespace {

// The elements of a storage that a tensor refers to.
struct Layout {
  Shape shape;
  Strides strides;
  std::int64_t offset = 0;

  static Layout of(const mica::detail::TensorImpl& x) { return {x.shape, x.strides, x.offset}; }
};

// The geometry of a base and one of its views, to convert between tensors of either shape. Values for the base are
// stored in the base's layout, so that the view's strides apply to them.
struct Region {
  Layout base, part;

  Tensor empty_base(DType dtype, Device device) const {
    std::int64_t extent = numel_of(base.shape) > 0 ? 1 : 0;
    for (int axis = 0; axis < base.shape.size() && extent > 0; ++axis) {
      extent += (base.shape[axis] - 1) * base.strides[axis];
    }
    return as_strided(empty({extent}, dtype, device), base.shape, base.strides, 0);
  }
  Tensor copy_of_base(const Tensor& whole) const {
    const Tensor copy = empty_base(whole.dtype(), whole.device());
    copy_into(copy, whole);
    return copy;
  }
  Tensor part_of(const Tensor& whole) const {
    return as_strided(whole, part.shape, part.strides, numel_of(part.shape) > 0 ? part.offset - base.offset : 0);
  }
};

// to += from, where `to` may have axes with a stride of 0, so that several elements share memory.
void add_spread(const Tensor& to, const Tensor& from) {
  for (int axis = 0; axis < to.dim(); ++axis) {
    if (to.strides()[axis] == 0 && to.shape()[axis] != 1) {
      const auto at = [axis](const Tensor& x, std::int64_t i) {
        Shape shape = x.shape();
        shape[axis] = 1;
        return as_strided(x, shape, x.strides(), x.handle()->offset + i * x.strides()[axis]);
      };
      for (std::int64_t i = 0; i < to.shape()[axis]; ++i) {
        add_spread(at(to, 0), at(from, i));
      }
      return;
    }
  }
  add_into(to, from);
}

// The part of a base that a view shows.
struct ReadPart {
  static constexpr bool composed = true;
  Region region;

  Tensor forward(Context&, const Tensor& whole) const {
    const Tensor part = empty(region.part.shape, whole.dtype(), whole.device());
    copy_into(part, region.part_of(region.copy_of_base(whole)));
    return part;
  }
  Tensor backward(Context&, const Tensor& dy) const;
};

// Zeros in the shape of the base, with the part filled in: the backward of ReadPart.
struct PadPart {
  static constexpr bool composed = true;
  Region region;

  Tensor forward(Context&, const Tensor& part) const {
    const Tensor whole = region.empty_base(part.dtype(), part.device());
    fill_data(whole, 0);
    add_spread(region.part_of(whole), part);
    return whole;
  }
  Tensor backward(Context&, const Tensor& dy) const { return apply(ReadPart{region}, dy); }
};

Tensor ReadPart::backward(Context&, const Tensor& dy) const { return apply(PadPart{region}, dy); }

// The base with zeros in place of the part.
struct ErasePart {
  static constexpr bool composed = true;
  Region region;

  Tensor forward(Context&, const Tensor& whole) const {
    const Tensor left = region.copy_of_base(whole);
    fill_data(region.part_of(left), 0);
    return left;
  }
  Tensor backward(Context&, const Tensor& dy) const { return apply(ErasePart{region}, dy); }
};

// New history of a view after its base was written in place: the view's part of the new base.
class ReadView final : public Node {
 public:
  explicit ReadView(Region region) : region_(region) {}

  std::string name() const override { return "ReadView"; }
  Tensors backward(Tensors gradients) override {
    return {gradients[0].defined() ? apply(PadPart{region_}, gradients[0]) : Tensor{}};
  }

 private:
  Region region_;
};

// New history of a base after one of its views was written in place: the old base (input 0), overwritten by the part
// (input 1).
class WriteView final : public Node {
 public:
  explicit WriteView(Region region) : region_(region) {}

  std::string name() const override { return "WriteView"; }
  Tensors backward(Tensors gradients) override {
    const Tensor& dy = gradients[0];
    const bool needs_base = dy.defined() && edges[0].node;
    return {needs_base ? apply(ErasePart{region_}, dy) : Tensor{},
            dy.defined() ? apply(ReadPart{region_}, dy) : Tensor{}};
  }

 private:
  Region region_;
};

template <class N>
void set_node(const Tensor& x, const Region& region, std::vector<Edge> edges) {
  SegmentWatch* const segment = SegmentWatch::current();
  if (segment != nullptr && std::any_of(edges.begin(), edges.end(), [&](const Edge& e) { return segment->made(e); })) {
    segment->add_output(x);
    return;
  }
  const auto node = make_node<N>(region);
  node->edges = std::move(edges);
  node->outputs.push_back({x.shape(), x.dtype(), x.device()});
  node->module = current_module();
  set_history(x, node, 0);
}

// The base of `x`; undefined if x is not a view, or if set_data moved one of the two to another storage.
Tensor base_of(const Tensor& x) {
  const auto& base = x.handle()->base;
  return base && base->storage == x.handle()->storage ? Tensor(base) : Tensor{};
}

bool is_leaf_with_gradient(const Tensor& x) { return x.requires_grad() && x.is_leaf(); }

}  // namespace

void check_writable(const char* op, const Tensor& x) {
  check(x.defined(), "{}: expected a defined target", op);
  check(!x.is_inference() || inference_mode_enabled(),
        "{}: the target of shape {} was created in inference mode and can be written in place only there", op,
        x.shape());
  if (!grad_enabled()) {
    return;
  }
  check(!is_leaf_with_gradient(x),
        "{}: the target of shape {} is a leaf that requires a gradient, and a recorded write would make it a non-leaf; "
        "use no_grad to change its elements, or write to a clone",
        op, x.shape());
  if (const Tensor base = base_of(x); base.defined()) {
    check(!is_leaf_with_gradient(base),
          "{}: the target of shape {} is a view of a leaf that requires a gradient, and a recorded write would make "
          "that a non-leaf; use no_grad to change its elements, or write to a clone",
          op, x.shape());
    if (x.requires_grad() && x.handle()->slot->custom_view) {
      fail(
          "{}: the target of shape {} is a view that {} returned, and autograd cannot tell how a write to it changes "
          "its base; write to a clone",
          op, x.shape(), x.grad_fn()->name());
    }
  }
}

void adopt_history(const Tensor& x, const Tensor& written) {
  const Edge made_by = gradient_edge(written);
  if (!made_by.node) {
    trace_write(x, written);
    return;
  }
  const Tensor base = base_of(x);
  if (!base.defined()) {
    set_history(x, made_by.node, made_by.output);
    ++x.handle()->history_version;
    return;
  }
  set_node<WriteView>(base, {Layout::of(*base.handle()), Layout::of(*x.handle())}, {gradient_edge(base), made_by});
  ++base.handle()->history_version;
}

void link_view(const Tensor& view, const Tensor& x) {
  mica::detail::TensorImpl& impl = *view.handle();
  if (!grad_enabled() || impl.storage != x.handle()->storage) {
    return;
  }
  impl.base = x.handle()->base ? x.handle()->base : x.handle();
  impl.history_version = impl.base->history_version;
  if (impl.slot) {
    impl.slot->custom_view = false;
  }
}

void link_custom_view(const Tensor& view, const Tensor& x) {
  link_view(view, x);
  view.handle()->slot->custom_view = true;
}

void update_view(const Tensor& x) {
  mica::detail::TensorImpl& impl = *x.handle();
  const Tensor base = base_of(x);
  const std::uint32_t history_version = impl.base->history_version;
  if (base.defined()) {
    if (impl.slot) {
      check(
          impl.slot->node || !impl.slot->requires_grad,
          "autograd: a leaf of shape {} that requires a gradient is a view of a tensor that {} wrote in place; detach "
          "the leaf from it, or write in no_grad",
          x.shape(), impl.storage->last_writer());
      if (impl.slot->custom_view) {
        fail(
            "autograd: {} returned a view of shape {} of a tensor that {} has since written in place, and autograd "
            "cannot derive that view again; return a copy from the op, or write to a clone",
            impl.slot->node->name(), x.shape(), impl.storage->last_writer());
      }
    }
    set_node<ReadView>(x, {Layout::of(*base.handle()), Layout::of(impl)}, {gradient_edge(base)});
  }
  impl.history_version = history_version;
}

}  // namespace mica::autograd
