#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/distributed/detail/group_state.h>
#include <mica/distributed/group.h>
#include <mica/profiler/profiler.h>

namespace mica::distributed {

namespace {

using detail::Call;
using detail::CallKind;
using detail::Collectives;
using detail::GroupState;

void check_tensor(const char* op, const Tensor& x) {
  check(x.defined(), "{}: expected a tensor, got an undefined one", op);
  check(x.is_contiguous(), "{}: expected a contiguous tensor, got one of shape {} and strides {}", op, x.shape(),
        x.strides());
}

void check_written(const char* op, const Tensor& x) {
  check_tensor(op, x);
  check(!autograd::grad_enabled() || !x.requires_grad(),
        "{}: the tensor of shape {} requires a gradient, and collectives are not recorded: pass x.detach(), or call it "
        "under autograd::NoGrad",
        op, x.shape());
}

// Checks the tensors of collectives with a tensor for all ranks (`whole`) and one for a single rank (`part`).
void check_parts(const char* op, const Tensor& whole, const Tensor& part, int size) {
  check(whole.dtype() == part.dtype() && whole.device() == part.device() && whole.numel() == size * part.numel(),
        "{}: expected tensors of one dtype and device, one with {} times the elements of the other, as there are {} "
        "ranks; got {} of {} on {} and {} of {} on {}",
        op, size, size, whole.shape(), whole.dtype(), whole.device(), part.shape(), part.dtype(), part.device());
}

void check_reduction(const char* op, const Tensor& x, Reduction reduction) {
  check(reduction >= Reduction::sum && reduction <= Reduction::max,
        "{}: expected sum, mean, min or max, got Reduction({})", op, static_cast<int>(reduction));
  check(reduction != Reduction::mean || is_floating(x.dtype()), "{}: expected a floating dtype for a mean, got {}", op,
        x.dtype());
  check(reduction != Reduction::sum || x.dtype() != boolean, "{}: expected numbers for a sum, got {}", op, x.dtype());
}

Collectives& collectives_for(const char* op, const GroupState& group, const Tensor& x) {
  const std::shared_ptr<Collectives>& found = x.device().is_cpu() ? group.cpu : group.cuda;
  check(found != nullptr, "{}: {}", op,
        x.device().is_cpu() ? "there is no engine for tensors on the CPU"
                            : "tensors on a GPU need NCCL, with which mica was not built");
  return *found;
}

// The tensors may have different shapes.
void copy_elements(const Tensor& from, const Tensor& into) {
  if (from.raw_data() != into.raw_data()) {
    copy_into(into, as_strided(from, into.shape(), into.strides(), from.handle()->offset));
  }
}

// A collective that becomes a part of a CUDA graph. Each replay records it in the log.
template <class Start>
Work capture_call(const char* op, const GroupState& group, const Call& call, const Start& start) {
  if (!call.on_gpu) {
    check_not_capturing(op);
  }
  const std::shared_ptr<detail::Transfer> transfer = start();
  if (const auto coordinator = group.coordinator) {
    on_each_replay([coordinator, op] { coordinator->check(op); });
    mica::detail::after_each_replay(
        [log = group.log, call, transfer] { log->attach(log->begin(call), transfer->replayed(), true); });
  }
  return Work(transfer);
}

// Runs a collective and records it in the log, so that the other ranks can detect failures.
template <class Start>
Work start_call(const char* op, const GroupState& group, const Call& call, const Start& start) {
  const ProfileRange range(op);
  if (group.coordinator != nullptr) {
    group.coordinator->check(op);
  }
  if (is_capturing()) {
    return capture_call(op, group, call, start);
  }
  if (group.coordinator == nullptr) {
    return Work(start());
  }
  const std::uint64_t number = group.log->begin(call);
  std::shared_ptr<detail::Transfer> transfer;
  try {
    transfer = start();
  } catch (...) {
    group.log->attach(number, nullptr);
    throw;
  }
  group.log->attach(number, transfer);
  return Work(std::move(transfer));
}

Call call_of(CallKind kind, const Tensor& x, Reduction reduction = Reduction::sum, int root = 0) {
  return {.kind = kind,
          .dtype = x.dtype(),
          .reduction = reduction,
          .on_gpu = x.device().is_cuda(),
          .root = root,
          .count = x.numel()};
}

/// Starts a collective from one tensor into another. A single rank copies.
template <class F>
Work start_between(const char* op, const GroupState& group, const Tensor& from, const Tensor& into, const Call& call,
                   const F& start) {
  if (group.size == 1) {
    copy_elements(from, into);
    return {};
  }
  if (from.numel() == 0) {
    return {};
  }
  Collectives& through = collectives_for(op, group, from);
  const Work work = start_call(op, group, call, [&] { return start(through); });
  into.bump_version(op);
  return work;
}

}  // namespace

void Work::wait() const {
  if (transfer_ != nullptr) {
    transfer_->wait();
  }
}

Group::Group() : Group(std::make_shared<const GroupState>()) {}

int Group::rank() const { return state_->rank; }
int Group::size() const { return state_->size; }

Work Group::start_all_reduce(const Tensor& x, Reduction reduction) const {
  constexpr const char* op = "all_reduce";
  check_written(op, x);
  check_reduction(op, x, reduction);
  if (size() == 1 || x.numel() == 0) {
    return {};
  }
  Collectives& through = collectives_for(op, *state_, x);
  const Work work = start_call(op, *state_, call_of(CallKind::all_reduce, x, reduction),
                               [&] { return through.all_reduce(x, reduction); });
  x.bump_version(op);
  return work;
}

Work Group::start_reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) const {
  constexpr const char* op = "reduce_scatter";
  check_tensor(op, from);
  check_written(op, into);
  check_parts(op, from, into, size());
  check_reduction(op, from, reduction);
  return start_between(op, *state_, from, into, call_of(CallKind::reduce_scatter, into, reduction),
                       [&](Collectives& through) { return through.reduce_scatter(from, into, reduction); });
}

Work Group::start_all_gather(const Tensor& from, const Tensor& into) const {
  constexpr const char* op = "all_gather";
  check_tensor(op, from);
  check_written(op, into);
  check_parts(op, into, from, size());
  return start_between(op, *state_, from, into, call_of(CallKind::all_gather, from),
                       [&](Collectives& through) { return through.all_gather(from, into); });
}

Work Group::start_broadcast(const Tensor& x, int root) const {
  constexpr const char* op = "broadcast";
  check_written(op, x);
  check(root >= 0 && root < size(), "{}: expected a root in [0, {}), got {}", op, size(), root);
  if (size() == 1 || x.numel() == 0) {
    return {};
  }
  Collectives& through = collectives_for(op, *state_, x);
  const Work work = start_call(op, *state_, call_of(CallKind::broadcast, x, Reduction::sum, root),
                               [&] { return through.broadcast(x, root); });
  if (rank() != root) {
    x.bump_version(op);
  }
  return work;
}

void Group::all_reduce(const Tensor& x, Reduction reduction) const { start_all_reduce(x, reduction).wait(); }
void Group::reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) const {
  start_reduce_scatter(from, into, reduction).wait();
}
void Group::all_gather(const Tensor& from, const Tensor& into) const { start_all_gather(from, into).wait(); }
void Group::broadcast(const Tensor& x, int root) const { start_broadcast(x, root).wait(); }

void Group::barrier() const {
  if (state_->barrier) {
    check_not_capturing("barrier");
    state_->barrier();
  }
}

Group Group::split(int color, int key) const {
  check(color >= 0, "split: expected color >= 0, got {}", color);
  if (state_->split) {
    check_not_capturing("split");
  }
  return state_->split ? Group(state_->split(color, key)) : *this;
}

}  // namespace mica::distributed
