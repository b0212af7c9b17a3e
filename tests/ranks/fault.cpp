// A rank of a run with a fault: mica_rank_fault HOW VICTIM MILLISECONDS FOLDER. All ranks call collectives in a loop,
// until fault HOW happens to rank VICTIM, MILLISECONDS after the start. The other ranks write the Error that they get,
// and the seconds since the fault, to FOLDER/error_RANK, if later collectives fail for the same reason; with the fault
// "last", they end and print it.
// scripts/rank_fault_test starts this program and checks the results. With MICA_FAULT_CUDA=1, each rank has its tensors
// on a GPU.

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/allocation_fault.h>
#include <mica/core/dispatch.h>
#include <mica/distributed/group.h>

namespace {

using mica::Tensor;
namespace distributed = mica::distributed;
using Clock = std::chrono::steady_clock;

// Shuts down this rank's sockets whose own or remote port is MICA_DIST_PORT or one of the 15 ports after it. MPI's
// connections are not affected.
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

// Faults that the timer causes at any moment. The loop causes the others between two collectives.
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

void hurt_in_loop(const std::string& how, const distributed::Group& world, mica::Device device) {
  const Tensor x = mica::full({100}, 1.0, mica::float32, device);
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
    if (device.is_cuda()) {
      (void)mica::zeros({std::int64_t{1} << 40}, mica::float32, device);
    }
    mica::memory::AllocationFault fault;
    fault.fail_after(0);
    (void)mica::zeros({1000, 1000});
  }
  if (how == "other") {
    world.broadcast(x);
  } else if (how == "size") {
    world.all_reduce(mica::full({4}, 1.0, mica::float32, device));
  } else if (how == "dtype") {
    world.all_reduce(mica::full({100}, 1, mica::int32, device));
  } else {
    throw std::invalid_argument("unknown fault " + how);
  }
}

// Whether other collectives fail for the reason in `first`, the text of an Error of all_reduce.
bool later_calls_fail(const distributed::Group& world, const std::string& first) {
  const std::string reason = first.substr(std::min(first.find(": "), first.size()));
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"barrier", [&] { world.barrier(); }},
      {"split", [&] { (void)world.split(0); }},
      {"broadcast", [&] { world.broadcast(mica::full({1}, 1.0)); }},
  };
  for (const auto& [op, call] : calls) {
    std::string text = "no error";
    try {
      call();
    } catch (const mica::Error& error) {
      text = error.what();
    }
    if (text != op + reason) {
      std::fprintf(stderr, "rank %d: %s after the error \"%s\": %s\n", world.rank(), op, first.c_str(), text.c_str());
      return false;
    }
  }
  return true;
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
  const distributed::Group world = distributed::world();
  const distributed::Group half = world.split(world.rank() % 2);
  // With these faults, results may be wrong until the fault is detected.
  const bool diverges = how == "other" || how == "size" || how == "dtype";
  const bool is_victim = world.rank() == victim;
  if (how == "last") {
    try {
      world.all_reduce(mica::full({100}, 1.0), is_victim ? distributed::Reduction::max : distributed::Reduction::sum);
    } catch (const mica::Error& error) {  // without MPI
      std::fprintf(stderr, "rank %d: %s\n", world.rank(), error.what());
      return 1;
    }
    return 0;  // All have a result and end with status 0, unless they notice at the end.
  }
  { std::ofstream(fmt::format("{}/process_{}", folder, world.rank())) << getpid() << "\n"; }
  const mica::Device device =
      std::getenv("MICA_FAULT_CUDA") != nullptr ? mica::Device::cuda(distributed::local_rank()) : mica::Device();
  const mica::DeviceGuard current(device);
  std::atomic<bool> now{false};
  const auto loop = [&] {
    const Tensor x = mica::full({100}, 1.0, mica::float32, device),
                 large = mica::full({200000}, 1.0, mica::float32, device);
    for (;;) {
      distributed::Work work = world.start_all_reduce(large, distributed::Reduction::mean);
      half.all_reduce(x, distributed::Reduction::mean);
      if (is_victim && now) {
        hurt_in_loop(how, world, device);
      }
      world.all_reduce(x, distributed::Reduction::mean);
      work.wait();
      // Results that a GPU computed with an aborted collective must not be visible.
      for (const float value : mica::to_vector<float>(x)) {
        if (value != 1 && !diverges) {
          std::fprintf(stderr, "rank %d: the mean of ones is %g\n", world.rank(), value);
          std::_Exit(4);
        }
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  };
  for (const distributed::Group& group : {world, half}) {
    group.all_reduce(mica::full({1}, 1.0, mica::float32, device));  // connects the GPUs before the timer starts
  }
  mica::synchronize(device);
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
      loop();  // the exception is not caught
    }
  }
  try {
    loop();
  } catch (const std::exception& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start - moment).count();
    if (!is_victim && !later_calls_fail(world, error.what())) {
      return 5;
    }
    std::ofstream(fmt::format("{}/error_{}", folder, world.rank()))
        << fmt::format("{:.2f} {}\n", seconds, error.what());
    if (is_victim && how == "memory") {
      distributed::report_failure(error.what());
    }
  }
  return 1;
}
