#include <array>
#include <csignal>

#include <mica/train/stop_signals.h>

namespace mica::train {

namespace {

constexpr std::array stop_signals{SIGINT, SIGTERM, SIGUSR1};

volatile std::sig_atomic_t stop_requested = 0;
int stop_guards = 0;
std::array<struct sigaction, stop_signals.size()> actions_before;

}  // namespace

StopSignals::StopSignals() {
  if (stop_guards++ > 0) {
    return;
  }
  stop_requested = 0;
  struct sigaction action {};
  action.sa_handler = [](int signal) {
    stop_requested = 1;
    std::signal(signal, SIG_DFL);
  };
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < stop_signals.size(); ++i) {
    sigaction(stop_signals[i], &action, &actions_before[i]);
  }
}

StopSignals::~StopSignals() {
  if (--stop_guards > 0) {
    return;
  }
  for (std::size_t i = 0; i < stop_signals.size(); ++i) {
    sigaction(stop_signals[i], &actions_before[i], nullptr);
  }
}

bool StopSignals::requested() { return stop_requested != 0; }

}  // namespace mica::train
