#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/autograd/profiler.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/memory.h>
#include <mica/distributed/detail/call.h>
#include <mica/distributed/detail/health/collective_log.h>
#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/network/placement.h>
#include <mica/distributed/detail/network/rendezvous.h>
#include <mica/distributed/detail/transport/collectives.h>
#include <mica/distributed/detail/transport/mpi.h>
#include <mica/distributed/detail/transport/nccl.h>
#include <mica/distributed/detail/transport/tcp.h>
#include <mica/distributed/group.h>

namespace mica::distributed {

namespace {

using detail::Bytes;
using detail::Call;
using detail::CallKind;
using detail::Collectives;
using detail::Control;
using detail::GroupState;
using detail::Journal;

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

Collectives& engine(const char* op, const GroupState& group, const Tensor& x) {
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

// Runs a collective and records it in the journal, so that the other ranks can detect failures.
template <class Start>
Work start_call(const char* op, const GroupState& group, const Call& call, const Start& start) {
  const ProfileRange range(op);
  check_not_capturing(op);  // collectives in a replay would not be in the journal
  if (group.control == nullptr) {
    return Work(start());
  }
  group.control->check(op);
  const std::uint64_t number = group.journal->begin(call);
  std::shared_ptr<detail::Transfer> transfer;
  try {
    transfer = start();
  } catch (...) {
    group.journal->attach(number, nullptr);
    throw;
  }
  group.journal->attach(number, transfer);
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

// The id of a group from split(): the same on all ranks that pass this color, and different from other groups' ids. A
// hash by splitmix64.
std::uint64_t id_of_part(std::uint64_t parent, std::uint64_t number, int color) {
  std::uint64_t h = parent;
  for (const std::uint64_t part : {number, static_cast<std::uint64_t>(color)}) {
    h += part + 0x9e3779b97f4a7c15U;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9U;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebU;
    h ^= h >> 31;
  }
  return h;
}

[[maybe_unused]] Bytes bytes_of(const Tensor& x) { return {x.raw_data(), x.raw_data() + x.bytes()}; }

// Without MPI: tensors on the CPU are sent over the control connections.
std::shared_ptr<const GroupState> state_of(const std::shared_ptr<Control>& control,
                                           const std::shared_ptr<Journal>& journal) {
  auto state = std::make_shared<GroupState>();
  const std::vector<int>& members = journal->members();
  state->rank = static_cast<int>(std::find(members.begin(), members.end(), control->rank()) - members.begin());
  state->size = static_cast<int>(members.size());
  state->control = control;
  state->journal = journal;
  state->cpu = detail::host_collectives(control, journal, state->rank);
#if MICA_WITH_NCCL
  state->cuda = detail::nccl_collectives(state->rank, state->size, control,
                                         [cpu = state->cpu](const Tensor& bytes) { cpu->broadcast(bytes, 0)->wait(); });
#endif
  state->barrier = [=] { (void)control->exchange(*journal, {}, CallKind::barrier); };
  state->split = [=](int color, int key) {
    std::uint64_t number = 0;
    const std::vector<Bytes> all =
        control->exchange(*journal, detail::Writer().value(color).value(key).take(), CallKind::split, &number);
    std::vector<std::pair<int, int>> part;  // key, rank in the world
    for (std::size_t i = 0; i < all.size(); ++i) {
      detail::Reader reader(all[i]);
      if (reader.value<int>() == color) {
        part.emplace_back(reader.value<int>(), journal->members()[i]);
      }
    }
    std::stable_sort(part.begin(), part.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<int> ranks;
    for (const auto& [of_rank, rank] : part) {
      ranks.push_back(rank);
    }
    return state_of(control, control->open(id_of_part(journal->id(), number, color), ranks));
  };
  return state;
}

#if MICA_WITH_MPI

std::shared_ptr<const GroupState> state_of(const std::shared_ptr<Control>& control,
                                           const std::shared_ptr<Journal>& journal,
                                           const std::shared_ptr<detail::MpiCollectives>& mpi) {
  auto state = std::make_shared<GroupState>();
  state->rank = mpi->rank();
  state->size = mpi->size();
  state->control = control;
  state->journal = journal;
  state->cpu = mpi;
#if MICA_WITH_NCCL
  state->cuda = detail::nccl_collectives(mpi->rank(), mpi->size(), control,
                                         [mpi](const Tensor& bytes) { mpi->broadcast(bytes, 0)->wait(); });
#endif
  state->barrier = [=] {
    const detail::Entered entered(*journal, {.kind = CallKind::barrier});
    mpi->barrier()->wait();
  };
  state->split = [=](int color, int key) {
    const detail::Entered entered(*journal, {.kind = CallKind::split});
    const std::shared_ptr<detail::MpiCollectives> part = mpi->split(color, key);
    const std::uint64_t id = id_of_part(journal->id(), entered.number(), color);
    return state_of(control, control->open(id, part->members()), part);
  };
  return state;
}

// Rank 0 sends its address to the others over MPI.
std::shared_ptr<Control> control_over(detail::MpiCollectives& mpi, bool one_machine) {
  const detail::ControlOptions options = detail::control_options_from_environment();
  constexpr std::int64_t size = 16384;
  const Tensor announced = zeros({size}, uint8);
  std::optional<detail::Descriptor> listener;
  detail::Token token{};
  if (mpi.rank() == 0) {
    Bytes bytes;
    try {
      std::vector<detail::Address> ports;
      for (const int port : detail::ports_from_environment()) {
        ports.push_back({.host = "", .port = port});
      }
      listener = detail::listen_at(ports, one_machine);
      token = detail::random_token();
      const std::vector<std::string> hosts =
          one_machine ? std::vector<std::string>{"127.0.0.1"} : detail::own_addresses();
      detail::Writer writer;
      writer.text("").bytes(Bytes(token.begin(), token.end())).value(detail::port_of(*listener));
      writer.value(static_cast<std::uint32_t>(hosts.size()));
      for (const std::string& host : hosts) {
        writer.text(host);
      }
      bytes = writer.take();
      check(bytes.size() <= size, "world: this machine has too many addresses");
    } catch (const Error& error) {
      bytes = detail::Writer().text(error.what()).take();
      bytes.resize(std::min<std::size_t>(bytes.size(), size));
    }
    std::memcpy(announced.raw_data(), bytes.data(), bytes.size());
  }
  mpi.broadcast(announced, 0)->wait();
  const Bytes bytes = bytes_of(announced);
  detail::Reader reader(bytes);
  const std::string problem = reader.text();
  if (!problem.empty()) {
    throw Error(problem);
  }
  if (mpi.rank() == 0) {
    return std::make_shared<Control>(std::move(*listener), mpi.size(), token, options);
  }
  const Bytes shown = reader.bytes();
  check(shown.size() == token.size(), "world: rank 0 sent a token of {} bytes", shown.size());
  std::copy(shown.begin(), shown.end(), token.begin());
  const auto port = reader.value<int>();
  std::vector<detail::Address> hub(reader.value<std::uint32_t>());
  for (detail::Address& address : hub) {
    address = {.host = reader.text(), .port = port};
  }
  return std::make_shared<Control>(hub, mpi.rank(), mpi.size(), token, options);
}

#endif

// The state needed to tell the other ranks when this process ends. Never destroyed.
struct Running {
  std::shared_ptr<Control> control;
  bool over_mpi;
  pid_t process;  // so that forked children report nothing
  std::terminate_handler terminate = nullptr;
};

std::atomic<Running*> running{nullptr};

Running* own_running() {
  Running* const found = running.load();
  return found != nullptr && found->process == getpid() ? found : nullptr;
}

void at_exit(int status, void* /*unused*/) {
  Running* const own = own_running();
  if (own == nullptr) {
    return;
  }
  if (status != 0) {
    own->control->report_failure(fmt::format("its program ended with exit status {}", status));
    if (own->over_mpi || std::getenv("TORCHELASTIC_RUN_ID") != nullptr) {
      // mpirun and torchrun kill the other ranks once this one has ended. Give them time to report, too.
      std::this_thread::sleep_for(std::chrono::seconds(2));
    }
  } else {
    const bool was_well = !own->control->failed();
    own->control->leave();
    if (was_well && own->control->failed()) {
      // For example, the last collective was another one on some rank, so results may be wrong.
      std::fprintf(stderr, "rank %d: %s\n", own->control->rank(), own->control->verdict().c_str());
      (void)std::fflush(nullptr);
      own->control->close();
      _exit(1);
    }
#if MICA_WITH_MPI
    if (own->over_mpi && !own->control->failed()) {
      detail::mpi_finalize();
    }
#endif
  }
  own->control->close();
}

void at_terminate() {
  if (Running* const own = own_running()) {
    std::string reason = "its program called std::terminate";
    if (const std::exception_ptr error = std::current_exception()) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& known) {
        reason = known.what();
      } catch (...) {
        reason = "an exception of unknown type ended its program";
      }
    }
    own->control->report_failure(reason);
    if (own->terminate != nullptr) {
      own->terminate();
    }
  }
  std::abort();
}

#if MICA_WITH_CUDA
// After an aborted collective, GPUs compute with wrong values.
void check_copied() {
  if (const Running* const own = own_running()) {
    own->control->check("copy from a GPU");
  }
}
#endif

void watch(const std::shared_ptr<Control>& control, bool over_mpi) {
  auto* const own = new Running{.control = control, .over_mpi = over_mpi, .process = getpid()};
  running = own;
#if MICA_WITH_CUDA
  memory::check_copies_by(check_copied);
#endif
  own->terminate = std::set_terminate(at_terminate);
#ifdef __GLIBC__
  check(on_exit(at_exit, nullptr) == 0, "world: on_exit failed");
#else
  check(std::atexit([] { at_exit(0, nullptr); }) == 0, "world: atexit failed");
#endif
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
  std::vector<int> all(static_cast<std::size_t>(placement.size));
  std::iota(all.begin(), all.end(), 0);
#if MICA_WITH_MPI
  if (placement.has_mpi) {
    const std::shared_ptr<detail::MpiCollectives> mpi =
        detail::mpi_world(detail::control_options_from_environment().start);
    check(mpi->rank() == placement.rank && mpi->size() == placement.size,
          "world: {} says that this process is rank {} of {}, MPI says {} of {}: was mica built with another MPI than "
          "that of the launcher?",
          placement.launcher, placement.rank, placement.size, mpi->rank(), mpi->size());
    const detail::MpiCollectives::Local local = mpi->local();
    const std::shared_ptr<Control> control = control_over(*mpi, local.size == mpi->size());
    detail::mpi_report_failures([control](const std::string& reason) { control->report_trouble(reason); });
    control->on_verdict([control = control.get()] { detail::mpi_abort(control->verdict()); });
    watch(control, true);
    return {.group = Group(state_of(control, control->open(0, all), mpi)), .local_rank = local.rank};
  }
#endif
  const detail::Meeting meeting = detail::meeting_from_environment(placement);
  const detail::ControlOptions options = detail::control_options_from_environment();
  const auto control =
      placement.rank == 0
          ? std::make_shared<Control>(detail::listen_at(meeting.addresses, meeting.loopback_only), placement.size,
                                      meeting.token, options)
          : std::make_shared<Control>(meeting.addresses, placement.rank, placement.size, meeting.token, options);
  watch(control, false);
  return {.group = Group(state_of(control, control->open(0, all))), .local_rank = placement.local_rank};
}

const World& the_world() {
  static const World& world = *new World(find_world());  // at_exit() shuts it down
  return world;
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
  Collectives& through = engine(op, *state_, x);
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
  if (size() == 1) {
    copy_elements(from, into);
    return {};
  }
  if (from.numel() == 0) {
    return {};
  }
  Collectives& through = engine(op, *state_, from);
  const Work work = start_call(op, *state_, call_of(CallKind::reduce_scatter, into, reduction),
                               [&] { return through.reduce_scatter(from, into, reduction); });
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
  Collectives& through = engine(op, *state_, from);
  const Work work =
      start_call(op, *state_, call_of(CallKind::all_gather, from), [&] { return through.all_gather(from, into); });
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
  Collectives& through = engine(op, *state_, x);
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

void report_failure(const std::string& reason) {
  if (Running* const own = own_running()) {
    own->control->report_failure(reason);
  }
}

void set_timeout(double seconds) {
  check(std::isfinite(seconds) && seconds >= 0, "set_timeout: expected seconds >= 0, got {}", seconds);
  (void)the_world();
  if (Running* const own = own_running()) {
    own->control->set_collective_timeout(seconds);
  }
}

LongTask::LongTask(const std::string& name) {
  if (Running* const own = own_running()) {
    own->control->begin_task(name);
    told_ = true;
  }
}

LongTask::~LongTask() {
  if (told_) {
    running.load()->control->end_task();
  }
}

Group world() { return the_world().group; }

int local_rank() { return the_world().local_rank; }

}  // namespace mica::distributed
