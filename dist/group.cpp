#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/dist/detail/collectives.h>
#include <mica/dist/detail/mpi.h>
#include <mica/dist/detail/nccl.h>
#include <mica/dist/detail/placement.h>
#include <mica/dist/group.h>

namespace mica::dist {

namespace {

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

// Of collectives with a tensor for all ranks (`whole`) and one for each (`part`).
void check_parts(const char* op, const Tensor& whole, const Tensor& part, int size) {
  check(whole.dtype() == part.dtype() && whole.device() == part.device() && whole.numel() == size * part.numel(),
        "{}: expected tensors of one dtype and device, one with {} times the elements of the other, as there are {} "
        "ranks; got {} of {} on {} and {} of {} on {}",
        op, size, size, whole.shape(), whole.dtype(), whole.device(), part.shape(), part.dtype(), part.device());
}

void check_reduction(const char* op, const Tensor& x, Reduction reduction) {
  check(reduction != Reduction::mean || is_floating(x.dtype()), "{}: expected a floating dtype for a mean, got {}", op,
        x.dtype());
  check(reduction != Reduction::sum || x.dtype() != boolean, "{}: expected numbers for a sum, got {}", op, x.dtype());
}

Collectives& engine(const char* op, const GroupState& group, const Tensor& x) {
  const std::shared_ptr<Collectives>& found = x.device().is_cpu() ? group.cpu : group.cuda;
  check(found != nullptr, "{}: {}", op,
        x.device().is_cpu() ? "tensors on the CPU need MPI: build mica with MPI and start the program with mpirun"
                            : "tensors on a GPU need NCCL, with which mica was not built");
  return *found;
}

// Of tensors that may have different shapes.
void copy_elements(const Tensor& from, const Tensor& into) {
  if (from.raw_data() != into.raw_data()) {
    copy_into(into, as_strided(from, into.shape(), into.strides(), from.handle()->offset));
  }
}

std::shared_ptr<const GroupState> state_of(const std::shared_ptr<detail::MpiCollectives>& mpi) {
  auto state = std::make_shared<GroupState>();
  state->rank = mpi->rank();
  state->size = mpi->size();
  state->cpu = mpi;
#if MICA_WITH_NCCL
  state->cuda = detail::nccl_collectives(mpi->rank(), mpi->size(),
                                         [mpi](const Tensor& bytes) { mpi->broadcast(bytes, 0)->wait(); });
#endif
  state->barrier = [mpi] { mpi->barrier()->wait(); };
  state->split = [mpi](int color, int key) { return state_of(mpi->split(color, key)); };
  return state;
}

struct World {
  Group group;
  int local_rank = 0;
};

World find_world() {
  const detail::Placement placement = detail::placement_from_environment();
  if (placement.size == 1) {
    return {};
  }
#if MICA_WITH_MPI
  check(placement.launcher != "torchrun", "world: processes that torchrun started are not supported yet");
  const std::shared_ptr<detail::MpiCollectives> mpi = detail::mpi_world();
  check(
      mpi->rank() == placement.rank && mpi->size() == placement.size,
      "world: {} says that this process is rank {} of {}, MPI says {} of {}: was mica built with another MPI than that "
      "of the launcher?",
      placement.launcher, placement.rank, placement.size, mpi->rank(), mpi->size());
  return {.group = Group(state_of(mpi)), .local_rank = mpi->local_rank()};
#else
  fail("world: {} started {} processes, but mica was built without MPI", placement.launcher, placement.size);
#endif
}

const World& the_world() {
  static const World world = find_world();
  return world;
}

}  // namespace

void Work::wait() const {
  if (transfer_ != nullptr) {
    transfer_->wait();
  }
}

Group::Group() : state_(std::make_shared<const GroupState>()) {}

int Group::rank() const { return state_->rank; }
int Group::size() const { return state_->size; }

Work Group::start_all_reduce(const Tensor& x, Reduction reduction) const {
  constexpr const char* op = "all_reduce";
  check_written(op, x);
  check_reduction(op, x, reduction);
  if (size() == 1 || x.numel() == 0) {
    return {};
  }
  const Work work(engine(op, *state_, x).all_reduce(x, reduction));
  x.bump_version(op);
  return work;
}

Work Group::start_reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) const {
  constexpr const char* op = "reduce_scatter";
  check_tensor(op, from);
  check_written(op, into);
  check_parts(op, from, into, size());
  check_reduction(op, from, reduction);
  if (size() == 1) {
    copy_elements(from, into);
    return {};
  }
  if (from.numel() == 0) {
    return {};
  }
  const Work work(engine(op, *state_, from).reduce_scatter(from, into, reduction));
  into.bump_version(op);
  return work;
}

Work Group::start_all_gather(const Tensor& from, const Tensor& into) const {
  constexpr const char* op = "all_gather";
  check_tensor(op, from);
  check_written(op, into);
  check_parts(op, into, from, size());
  if (size() == 1) {
    copy_elements(from, into);
    return {};
  }
  if (from.numel() == 0) {
    return {};
  }
  const Work work(engine(op, *state_, from).all_gather(from, into));
  into.bump_version(op);
  return work;
}

Work Group::start_broadcast(const Tensor& x, int root) const {
  constexpr const char* op = "broadcast";
  check_written(op, x);
  check(root >= 0 && root < size(), "{}: expected a root in [0, {}), got {}", op, size(), root);
  if (size() == 1 || x.numel() == 0) {
    return {};
  }
  const Work work(engine(op, *state_, x).broadcast(x, root));
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
    state_->barrier();
  }
}

Group Group::split(int color, int key) const {
  check(color >= 0, "split: expected color >= 0, got {}", color);
  return state_->split ? Group(state_->split(color, key)) : *this;
}

Group world() { return the_world().group; }

int local_rank() { return the_world().local_rank; }

}  // namespace mica::dist
