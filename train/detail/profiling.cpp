#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include <mica/core/memory_stats.h>
#include <mica/train/detail/profiling.h>

namespace mica::train::detail {

namespace {

constexpr std::int64_t profiled_steps = 10;

std::string mebibytes(std::size_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / 0x1p20); }

}  // namespace

Profiling::Profiling(TrainingStep& training, std::int64_t steps, bool graph, bool prints, std::filesystem::path trace)
    : training_(training),
      first_(std::min<std::int64_t>(6, steps)),
      graph_(graph),
      prints_(prints),
      trace_(std::move(trace)) {
  training_.allow_graph(false);
}

void Profiling::before_step(std::int64_t number) {
  if (number == first_) {
    synchronize(training_.device());
    reset_peak_memory(training_.device());
    profiler_.emplace(ProfilerOptions{.device = training_.device().is_cuda(), .nvtx = true});
  }
}

void Profiling::after_step(bool last) {
  if (!profiler_) {
    return;
  }
  profiler_->step();
  if (profiler_->steps() < profiled_steps && !last) {
    return;
  }
  profiler_->stop();
  if (!trace_.empty()) {
    profiler_->write_trace(trace_);
  }
  if (prints_) {
    const MemoryUse memory = training_.memory();
    fmt::print("{}\nmemory: weights {}, gradients {}, optimizer {}, workspace {}, activations and other {}; peak {}\n",
               profiler_->table(), mebibytes(memory.weights), mebibytes(memory.gradients), mebibytes(memory.optimizer),
               mebibytes(memory.workspace), mebibytes(memory.others), mebibytes(memory.peak));
    fmt::print("{}", trace_.empty() ? "" : fmt::format("wrote {}\n", trace_.string()));
  }
  profiler_.reset();
  training_.allow_graph(graph_);
}

}  // namespace mica::train::detail
