#include "examples/common/program.h"

#include <algorithm>
#include <cstdio>

#include <mica/core/check.h>

volatile std::sig_atomic_t interrupted = 0;

int print_error(const char* program, std::string message, int status) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", program, message.c_str());
  return status;
}

void put(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void catch_interrupts() {
  const auto interrupt = [](int signal) {
    interrupted = 1;
    std::signal(signal, SIG_DFL);  // a second signal terminates the program
  };
  std::signal(SIGINT, interrupt);
  std::signal(SIGTERM, interrupt);
}

mica::Device device_named(const std::string& name) {
  if (name == "cpu" || (name == "auto" && !mica::cuda_available())) {
    return mica::Device::cpu();
  }
  mica::check(mica::cuda_available(), "no CUDA device is available{}",
              MICA_WITH_CUDA ? "" : "; this program was built without CUDA");
  return mica::Device::cuda();
}
