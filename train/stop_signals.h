#pragma once

namespace mica::train {

/// During its lifetime, SIGINT (Ctrl-C), SIGTERM and SIGUSR1, which mpirun and Slurm pass on, do not end the program
/// but ask it to stop. A second signal of the same kind ends it. Several may exist; the last one restores what the
/// signals did before. For the main thread only.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether a signal has asked the program to stop since the first of the existing objects was constructed.
  static bool requested();
};

}  // namespace mica::train
