// The group of all ranks: how it is found, and what happens when this process ends.

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

#include <mica/core/creation.h>
#include <mica/core/detail/memory.h>
#include <mica/distributed/detail/group_state.h>
#include <mica/distributed/detail/network/placement.h>
#include <mica/distributed/detail/network/rendezvous.h>
#include <mica/distributed/detail/transport/mpi.h>
#include <mica/distributed/detail/transport/nccl.h>
#include <mica/distributed/detail/transport/tcp.h>
#include <mica/distributed/group.h>

namespace mica::distributed {

namespace {

using detail::Bytes;
using detail::CallKind;
using detail::CollectiveLog;
using detail::Collectives;
using detail::Coordinator;
using detail::GroupState;

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

// What groups with and without MPI have in common.
std::shared_ptr<GroupState> make_state(const std::shared_ptr<Coordinator>& coordinator,
                                       const std::shared_ptr<CollectiveLog>& log,
                                       const std::shared_ptr<Collectives>& cpu, int rank) {
  auto state = std::make_shared<GroupState>();
  state->rank = rank;
  state->size = static_cast<int>(log->members().size());
  state->coordinator = coordinator;
  state->log = log;
  state->cpu = cpu;
#if MICA_WITH_NCCL
  state->cuda = detail::nccl_collectives(rank, state->size, coordinator,
                                         [cpu](const Tensor& bytes) { cpu->broadcast(bytes, 0)->wait(); });
#endif
  return state;
}

// Without MPI: tensors on the CPU are sent over the coordinator's connections.
std::shared_ptr<const GroupState> state_of(const std::shared_ptr<Coordinator>& coordinator,
                                           const std::shared_ptr<CollectiveLog>& log) {
  const std::vector<int>& members = log->members();
  const auto rank = static_cast<int>(std::find(members.begin(), members.end(), coordinator->rank()) - members.begin());
  const std::shared_ptr<GroupState> state =
      make_state(coordinator, log, detail::tcp_collectives(coordinator, log, rank), rank);
  state->barrier = [=] { (void)coordinator->exchange(*log, {}, CallKind::barrier); };
  state->split = [=](int color, int key) {
    std::uint64_t number = 0;
    const std::vector<Bytes> all =
        coordinator->exchange(*log, detail::Writer().value(color).value(key).take(), CallKind::split, &number);
    std::vector<std::pair<int, int>> part;  // key, rank in the world
    for (std::size_t i = 0; i < all.size(); ++i) {
      detail::Reader reader(all[i]);
      if (reader.value<int>() == color) {
        part.emplace_back(reader.value<int>(), log->members()[i]);
      }
    }
    std::stable_sort(part.begin(), part.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<int> ranks;
    ranks.reserve(part.size());
    for (const auto& [of_rank, rank_in_world] : part) {
      ranks.push_back(rank_in_world);
    }
    return state_of(coordinator, coordinator->open(id_of_part(log->id(), number, color), ranks));
  };
  return state;
}

#if MICA_WITH_MPI

std::shared_ptr<const GroupState> state_of(const std::shared_ptr<Coordinator>& coordinator,
                                           const std::shared_ptr<CollectiveLog>& log,
                                           const std::shared_ptr<detail::MpiCollectives>& mpi) {
  const std::shared_ptr<GroupState> state = make_state(coordinator, log, mpi, mpi->rank());
  state->barrier = [=] {
    const detail::LoggedCall call(*log, {.kind = CallKind::barrier});
    mpi->barrier()->wait();
  };
  state->split = [=](int color, int key) {
    const detail::LoggedCall call(*log, {.kind = CallKind::split});
    const std::shared_ptr<detail::MpiCollectives> part = mpi->split(color, key);
    const std::uint64_t id = id_of_part(log->id(), call.number(), color);
    return state_of(coordinator, coordinator->open(id, part->members()), part);
  };
  return state;
}

std::vector<detail::Address> own_ports() {
  std::vector<detail::Address> ports;
  for (const int port : detail::ports_from_environment()) {
    ports.push_back({.host = "", .port = port});
  }
  return ports;
}

// Where rank 0 listens, for the other ranks. An empty text comes first, as nothing went wrong.
Bytes announcement(const detail::Descriptor& listener, const detail::Token& token, bool one_machine) {
  const std::vector<std::string> hosts = one_machine ? std::vector<std::string>{"127.0.0.1"} : detail::own_addresses();
  detail::Writer writer;
  writer.text("").bytes(Bytes(token.begin(), token.end())).value(detail::port_of(listener));
  writer.value(static_cast<std::uint32_t>(hosts.size()));
  for (const std::string& host : hosts) {
    writer.text(host);
  }
  return writer.take();
}

// Rank 0 announces its address to the others over MPI.
std::shared_ptr<Coordinator> coordinator_over(detail::MpiCollectives& mpi, bool one_machine) {
  const detail::CoordinatorOptions options = detail::coordinator_options_from_environment();
  constexpr std::int64_t size = 16384;
  const Tensor announced = zeros({size}, uint8);
  std::optional<detail::Descriptor> listener;
  detail::Token token{};
  if (mpi.rank() == 0) {
    Bytes bytes;
    try {
      listener = detail::listen_at(own_ports(), one_machine);
      token = detail::random_token();
      bytes = announcement(*listener, token, one_machine);
      check(bytes.size() <= size, "world: this machine has too many addresses");
    } catch (const Error& error) {
      bytes = detail::Writer().text(error.what()).take();
      bytes.resize(std::min<std::size_t>(bytes.size(), size));
    }
    std::memcpy(announced.raw_data(), bytes.data(), bytes.size());
  }
  mpi.broadcast(announced, 0)->wait();
  const Bytes bytes(announced.raw_data(), announced.raw_data() + announced.bytes());
  detail::Reader reader(bytes);
  const std::string problem = reader.text();
  if (!problem.empty()) {
    throw Error(problem);
  }
  if (mpi.rank() == 0) {
    return std::make_shared<Coordinator>(std::move(*listener), mpi.size(), token, options);
  }
  const Bytes shown = reader.bytes();
  check(shown.size() == token.size(), "world: rank 0 sent a token of {} bytes", shown.size());
  std::copy(shown.begin(), shown.end(), token.begin());
  const auto port = reader.value<int>();
  std::vector<detail::Address> addresses(reader.value<std::uint32_t>());
  for (detail::Address& address : addresses) {
    address = {.host = reader.text(), .port = port};
  }
  return std::make_shared<Coordinator>(addresses, mpi.rank(), mpi.size(), token, options);
}

#endif

// The run of which this process is a rank, for the functions that are called when it ends. Never destroyed.
struct Run {
  std::shared_ptr<Coordinator> coordinator;
  bool over_mpi;
  pid_t process;
  std::terminate_handler terminate = nullptr;
};

std::atomic<Run*> the_run{nullptr};

// Null in a child process made by fork(), which is no rank.
Run* own_run() {
  Run* const found = the_run.load();
  return found != nullptr && found->process == getpid() ? found : nullptr;
}

void at_exit(int status, void* /*unused*/) {
  Run* const own = own_run();
  if (own == nullptr) {
    return;
  }
  if (status != 0) {
    own->coordinator->report_failure(fmt::format("its program ended with exit status {}", status));
    if (own->over_mpi || std::getenv("TORCHELASTIC_RUN_ID") != nullptr) {
      // mpirun and torchrun kill the other ranks once this one has ended. Give them time to report, too.
      std::this_thread::sleep_for(std::chrono::seconds(2));
    }
  } else {
    const bool was_healthy = !own->coordinator->failed();
    own->coordinator->leave();
    if (was_healthy && own->coordinator->failed()) {
      // For example, the last collective was another one on some rank, so results may be wrong.
      std::fprintf(stderr, "rank %d: %s\n", own->coordinator->rank(), own->coordinator->failure().c_str());
      (void)std::fflush(nullptr);
      own->coordinator->close();
      _exit(1);
    }
#if MICA_WITH_MPI
    if (own->over_mpi && !own->coordinator->failed()) {
      detail::mpi_finalize();
    }
#endif
  }
  own->coordinator->close();
}

void at_terminate() {
  if (Run* const own = own_run()) {
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
    own->coordinator->report_failure(reason);
    if (own->terminate != nullptr) {
      own->terminate();
    }
  }
  std::abort();
}

#if MICA_WITH_CUDA
// After an aborted collective, GPUs compute with wrong values.
void check_copied() {
  if (const Run* const own = own_run()) {
    own->coordinator->check("copy from a GPU");
  }
}
#endif

void watch(const std::shared_ptr<Coordinator>& coordinator, bool over_mpi) {
  auto* const own = new Run{.coordinator = coordinator, .over_mpi = over_mpi, .process = getpid()};
  the_run = own;
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
        detail::mpi_world(detail::coordinator_options_from_environment().start_timeout);
    check(mpi->rank() == placement.rank && mpi->size() == placement.size,
          "world: {} says that this process is rank {} of {}, MPI says {} of {}: was mica built with another MPI than "
          "that of the launcher?",
          placement.launcher, placement.rank, placement.size, mpi->rank(), mpi->size());
    const detail::MpiCollectives::Local local = mpi->local();
    const std::shared_ptr<Coordinator> coordinator = coordinator_over(*mpi, local.size == mpi->size());
    detail::mpi_report_failures([coordinator](const std::string& reason) { coordinator->report_error(reason); });
    coordinator->on_failure([coordinator = coordinator.get()] { detail::mpi_abort(coordinator->failure()); });
    watch(coordinator, true);
    return {.group = Group(state_of(coordinator, coordinator->open(0, all), mpi)), .local_rank = local.rank};
  }
#endif
  const detail::Rendezvous rendezvous = detail::rendezvous_from_environment(placement);
  const detail::CoordinatorOptions options = detail::coordinator_options_from_environment();
  const auto coordinator =
      placement.rank == 0
          ? std::make_shared<Coordinator>(detail::listen_at(rendezvous.addresses, rendezvous.loopback_only),
                                          placement.size, rendezvous.token, options)
          : std::make_shared<Coordinator>(rendezvous.addresses, placement.rank, placement.size, rendezvous.token,
                                          options);
  watch(coordinator, false);
  return {.group = Group(state_of(coordinator, coordinator->open(0, all))), .local_rank = placement.local_rank};
}

const World& the_world() {
  static const World& world = *new World(find_world());  // at_exit() shuts it down
  return world;
}

}  // namespace

void report_failure(const std::string& reason) {
  if (Run* const own = own_run()) {
    own->coordinator->report_failure(reason);
  }
}

void set_timeout(double seconds) {
  check(std::isfinite(seconds) && seconds >= 0, "set_timeout: expected seconds >= 0, got {}", seconds);
  (void)the_world();
  if (Run* const own = own_run()) {
    own->coordinator->set_collective_timeout(seconds);
  }
}

LongTask::LongTask(const std::string& name) {
  if (Run* const own = own_run()) {
    own->coordinator->begin_task(name);
    told_ = true;
  }
}

LongTask::~LongTask() {
  if (told_) {
    the_run.load()->coordinator->end_task();
  }
}

Group world() { return the_world().group; }

int local_rank() { return the_world().local_rank; }

}  // namespace mica::distributed
