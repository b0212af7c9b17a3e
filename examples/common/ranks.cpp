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
#include <set>
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

int wait_for_ranks(std::chrono::milliseconds patience) {
  int result = 0;  // of the rank that fails first, since it has the cause
  std::set<pid_t> stopped;
  auto last_end = std::chrono::steady_clock::now();
  while (!started_ranks.empty()) {
    int status = 0;
    const pid_t process = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED);
    if (process <= 0) {
      // When a rank has failed, the others report that and end by themselves, except those that are stopped or hang.
      if (result != 0 &&
          (stopped.size() == started_ranks.size() || std::chrono::steady_clock::now() > last_end + patience)) {
        for (const pid_t rank : started_ranks) {
          (void)kill(rank, SIGKILL);
        }
      }
      usleep(20000);
      continue;
    }
    if (WIFSTOPPED(status)) {
      stopped.insert(process);
      continue;
    }
    stopped.erase(process);
    if (WIFCONTINUED(status)) {
      continue;
    }
    std::replace(started_ranks.begin(), started_ranks.end(), process, pid_t{0});
    std::erase(started_ranks, 0);
    last_end = std::chrono::steady_clock::now();
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result = result == 0 ? code : result;
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
  std::exit(run_ranks(count, program, argv));
}

int run_ranks(int count, const std::string& program, char** argv, std::chrono::milliseconds patience) {
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
  return wait_for_ranks(patience);
}
