#include "examples/common/ranks.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/program.h"
#include <mica/core/check.h>
#include <mica/distributed/group.h>

using namespace mica;

void join_ranks() {
  rank_of_messages = distributed::world().rank();
  if (rank_of_messages > 0) {
    check(std::freopen("/dev/null", "w", stdout) != nullptr, "cannot open /dev/null: {}", std::strerror(errno));
  }
}

void refuse_ranks(const char* program) {
  if (const int ranks = distributed::world().size(); ranks > 1) {
    throw UsageError(fmt::format("{} runs as one process, but was started as {} ranks", program, ranks));
  }
}

namespace {

// A port that is free now. If it is taken meanwhile, world() tries those after it.
int free_port() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool found = listener >= 0 && bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  check(found, "--gpus: cannot find a free TCP port: {}", std::strerror(errno));
  (void)close(listener);
  return ntohs(address.sin_port);
}

std::vector<pid_t> started_ranks;

// Waits for the ranks, which end by themselves when one of them fails, and returns their exit status. A rank that hangs
// is killed.
int wait_for_ranks() {
  // The rank that fails first has the cause.
  constexpr int patience = 30;  // seconds
  int result = 0, left = static_cast<int>(started_ranks.size());
  std::optional<std::chrono::steady_clock::time_point> failed;
  while (left > 0) {
    int status = 0;
    const pid_t process = waitpid(-1, &status, WNOHANG);
    if (process <= 0) {
      if (failed && std::chrono::steady_clock::now() > *failed + std::chrono::seconds(patience)) {
        for (const pid_t rank : started_ranks) {
          (void)kill(rank, SIGKILL);
        }
      }
      usleep(20000);
      continue;
    }
    std::replace(started_ranks.begin(), started_ranks.end(), process, pid_t{0});
    std::erase(started_ranks, 0);
    --left;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code != 0 && result == 0) {
      result = code;
      failed = std::chrono::steady_clock::now();
    }
  }
  return result;
}

}  // namespace

void start_ranks_on_gpus(int count, char** argv) {
  const int ranks = distributed::world().size();
  check(cuda_device_count() >= count, "--gpus: expected at most the {} usable GPUs of this machine, got {}",
        cuda_device_count(), count);
  if (ranks == count) {
    return;
  }
  check(ranks == 1, "--gpus: expected as many GPUs as ranks were started, which is {}, got {}", ranks, count);
  std::string program(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", program.data(), program.size() - 1);
  check(length > 0, "--gpus: cannot find this program's path");
  program.resize(static_cast<std::size_t>(length));
  setenv("WORLD_SIZE", std::to_string(count).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  std::fflush(nullptr);
  for (int rank = 0; rank < count; ++rank) {
    setenv("RANK", std::to_string(rank).c_str(), 1);
    setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    const pid_t parent = getpid(), process = fork();
    check(process >= 0, "--gpus: cannot start a process: {}", std::strerror(errno));
    if (process == 0) {
      (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (getppid() == parent) {
        execv(program.c_str(), argv);
      }
      _exit(127);
    }
    started_ranks.push_back(process);
  }
  // Ctrl-C also reaches the ranks directly, so this process need not pass it on.
  std::signal(SIGINT, SIG_IGN);
  for (const int asks : {SIGTERM, SIGUSR1}) {
    std::signal(asks, [](int signal) {
      for (const pid_t rank : started_ranks) {
        (void)kill(rank, signal);
      }
    });
  }
  std::exit(wait_for_ranks());
}
