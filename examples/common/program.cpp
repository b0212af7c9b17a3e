#include "examples/common/program.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <mica/core/check.h>
#include <mica/core/dispatch.h>
#include <mica/dist/group.h>
#include <mica/io/file.h>

volatile std::sig_atomic_t interrupted = 0;
int rank_of_messages = 0;

int print_error(const char* program, std::string message, int status) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::fflush(stdout);
  // One write, since several ranks may write at the same time.
  const std::string rank = rank_of_messages > 0 ? fmt::format("rank {}: ", rank_of_messages) : "";
  const std::string line = fmt::format("{}: {}{}\n", program, rank, message);
  std::fwrite(line.data(), 1, line.size(), stderr);
  return status;
}

void put(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

bool shows_on_terminal(int file) {
  // Open MPI's mpirun gives its ranks a pseudo-terminal, even if its own output is not a terminal.
  return isatty(file) == 1 && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
}

void catch_interrupts() {
  const auto interrupt = [](int signal) {
    interrupted = 1;
    std::signal(signal, SIG_DFL);  // a second signal terminates the program
  };
  std::signal(SIGINT, interrupt);
  std::signal(SIGTERM, interrupt);
  std::signal(SIGUSR1, interrupt);
}

namespace {

std::string name_in_faults;

void report_fault(int signal, siginfo_t* info, void*) {
  const char* const path = mica::io::mapped_path_at(info->si_addr);
  if (path == nullptr) {
    std::signal(signal, SIG_DFL);  // the instruction that failed is repeated, and ends the process
    return;
  }
  for (const char* const part : {name_in_faults.c_str(), ": cannot read ", path,
                                 ": it was truncated while it was in use, or its disk failed\n"}) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, part, std::strlen(part));
  }
  _exit(1);
}

}  // namespace

void report_mapping_faults(const std::string& program) {
  name_in_faults = program;
  struct sigaction action {};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

mica::Device device_named(const std::string& name) {
  if (name == "cpu" || (name == "auto" && !mica::cuda_available())) {
    return mica::Device::cpu();
  }
  mica::check(mica::cuda_available(), "no CUDA device is available{}",
              MICA_WITH_CUDA ? "" : "; this program was built without CUDA");
  const int index = mica::dist::local_rank();
  mica::check(index < mica::cuda_device_count(),
              "expected a GPU for each rank on this machine, which has {}: start fewer ranks, or use --device cpu",
              mica::cuda_device_count());
  // Make the device current on this thread: ops then need not switch to it, and no rank allocates on another rank's
  // GPU.
  [[maybe_unused]] static const auto* const current = new mica::DeviceGuard(mica::Device::cuda(index));
  return mica::Device::cuda(index);
}
