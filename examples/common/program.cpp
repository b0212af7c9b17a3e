#include "examples/common/program.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>

#include <mica/core/check.h>
#include <mica/core/dispatch.h>
#include <mica/distributed/group.h>
#include <mica/io/file.h>
#include <mica/ops/matmul/matmul.h>

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
  const int index = mica::distributed::local_rank();
  mica::check(index < mica::cuda_device_count(),
              "expected a GPU for each rank on this machine, which has {}: start fewer ranks, or use --device cpu",
              mica::cuda_device_count());
  // Make the device current on this thread: ops then need not switch to it, and no rank allocates on another rank's
  // GPU.
  [[maybe_unused]] static const auto* const current = new mica::DeviceGuard(mica::Device::cuda(index));
  return mica::Device::cuda(index);
}

mica::DType dtype_named(const std::string& name, mica::Device device) {
  if (name == "auto") {
    return mica::has_fast_bfloat16(device) ? mica::bfloat16 : mica::float32;
  }
  return name == "float16" ? mica::float16 : name == "bfloat16" ? mica::bfloat16 : mica::float32;
}
