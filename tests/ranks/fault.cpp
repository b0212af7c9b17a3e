// A rank of a run that is disturbed: mica_rank_fault HOW VICTIM MILLISECONDS FOLDER. All ranks call collectives in a
// loop, until something happens to rank VICTIM some time after the start. The others write the Error that they get, and
// the seconds since then, to FOLDER/RANK. scripts/rank_fault_test starts it and judges.

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include <mica/core/allocation_fault.h>
#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/dist/group.h>

namespace {

using mica::Tensor;
namespace dist = mica::dist;
using Clock = std::chrono::steady_clock;

// Closes what rank 0 listens for at MICA_DIST_PORT and the ports after it, which leaves MPI's connections.
void cut_link() {
  const int first = std::atoi(std::getenv("MICA_DIST_PORT"));
  for (int descriptor = 3; descriptor < 1024; ++descriptor) {
    for (const auto name : {getsockname, getpeername}) {
      sockaddr_in address{};
      socklen_t size = sizeof address;
      if (name(descriptor, reinterpret_cast<sockaddr*>(&address), &size) == 0 && address.sin_family == AF_INET &&
          ntohs(address.sin_port) >= first && ntohs(address.sin_port) < first + 16) {
        (void)shutdown(descriptor, SHUT_RDWR);
      }
    }
  }
}

// What the timer does at any moment, and what the loop does where it stands.
bool hurt_at_once(const std::string& how) {
  if (how == "kill") {
    (void)kill(getpid(), SIGKILL);
  } else if (how == "crash") {
    (void)kill(getpid(), SIGSEGV);
  } else if (how == "stop") {
    (void)kill(getpid(), SIGSTOP);
  } else if (how == "link") {
    cut_link();
  } else {
    return false;
  }
  return true;
}

void hurt_in_loop(const std::string& how, const dist::Group& world) {
  const Tensor x = mica::full({100}, 1.0);
  if (how == "throw") {
    throw std::runtime_error("loss is not finite");
  }
  if (how == "exit") {
    std::exit(0);
  }
  if (how == "status") {
    std::exit(3);
  }
  if (how == "sleep") {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (how == "memory") {
    mica::memory::AllocationFault fault;
    fault.fail_after(0);
    (void)mica::zeros({1000, 1000});
  }
  if (how == "other") {
    world.broadcast(x);
  } else if (how == "size") {
    world.all_reduce(mica::full({4}, 1.0));
  } else if (how == "dtype") {
    world.all_reduce(mica::full({100}, 1, mica::int32));
  } else {
    throw std::invalid_argument("unknown fault " + how);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "expected HOW VICTIM MILLISECONDS FOLDER\n");
    return 2;
  }
  const std::string how = argv[1], folder = argv[4];
  const int victim = std::atoi(argv[2]);
  const auto moment = std::chrono::milliseconds(std::atoi(argv[3]));
  const dist::Group world = dist::world();
  const dist::Group half = world.split(world.rank() % 2);
  const bool is_victim = world.rank() == victim;
  { std::ofstream(fmt::format("{}/process_{}", folder, world.rank())) << getpid() << "\n"; }
  // torchrun's variables start ranks without MPI: there are barriers and groups, but no collectives for these tensors.
  const bool over_mpi = std::getenv("WORLD_SIZE") == nullptr;
  if (!over_mpi) {
    try {
      world.all_reduce(mica::full({4}, 1.0));
      return 2;
    } catch (const mica::Error& error) {
      if (std::string(error.what()).find("tensors on the CPU need MPI") == std::string::npos || half.size() != 2 ||
          half.rank() != world.rank() / 2) {
        std::fprintf(stderr, "rank %d: %s\n", world.rank(), error.what());
        return 2;
      }
    }
  }
  std::atomic<bool> now{false};
  const auto loop = [&] {
    const Tensor x = mica::full({100}, 1.0), large = mica::full({200000}, 1.0);
    for (;;) {
      if (!over_mpi) {
        half.barrier();
        if (is_victim && now) {
          hurt_in_loop(how, world);
        }
        world.barrier();
        continue;
      }
      dist::Work work = world.start_all_reduce(large, dist::Reduction::mean);
      half.all_reduce(x, dist::Reduction::mean);
      if (is_victim && now) {
        hurt_in_loop(how, world);
      }
      world.all_reduce(x, dist::Reduction::mean);
      work.wait();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  };
  world.barrier();
  const Clock::time_point start = Clock::now();
  if (is_victim) {
    std::thread([&] {
      std::this_thread::sleep_for(moment);
      if (!hurt_at_once(how)) {
        now = true;
      }
    }).detach();
    if (how == "throw") {
      loop();  // nobody catches it
    }
  }
  try {
    loop();
  } catch (const std::exception& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start - moment).count();
    std::ofstream(fmt::format("{}/error_{}", folder, world.rank()))
        << fmt::format("{:.2f} {}\n", seconds, error.what());
    if (is_victim && how == "memory") {
      dist::report_failure(error.what());
    }
  }
  return 1;
}
