#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <mica/autograd/detail/module_name.h>
#include <mica/autograd/detail/op_observer.h>
#include <mica/core/check.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/memory_stats.h>
#include <mica/profiler/detail/device_trace.h>
#include <mica/profiler/profiler.h>

namespace mica {

namespace {

using autograd::ModuleName;
using autograd::OpObserver;

constexpr double kPerMs = 1e6;  // nanoseconds

const char* name_of(OpObserver::Phase phase) {
  switch (phase) {
    case OpObserver::Phase::forward: return "forward";
    case OpObserver::Phase::backward: return "backward";
    default: return "";
  }
}

// The indices of `times` by descending time; equal times keep their order.
std::vector<std::size_t> longest_first(const std::vector<double>& times) {
  std::vector<std::size_t> order(times.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&times](std::size_t a, std::size_t b) { return times[a] > times[b] || (times[a] == times[b] && a < b); });
  return order;
}

// Moves the values out of a map, sorted by descending `time`.
template <class Key, class Value, class Time>
std::vector<Value> by_time(std::map<Key, Value>& values, const Time& time) {
  std::vector<double> times;
  std::vector<Value*> found;
  for (auto& [key, value] : values) {
    times.push_back(time(value));
    found.push_back(&value);
  }
  std::vector<Value> sorted;
  for (const std::size_t i : longest_first(times)) {
    sorted.push_back(std::move(*found[i]));
  }
  return sorted;
}

// "h.3.mlp" as "h.*.mlp".
std::string without_indices(const std::string& path) {
  std::string result;
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t end = std::min(path.find('.', at), path.size());
    const std::string part = path.substr(at, end - at);
    const bool is_index =
        !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    result += (at == 0 ? "" : ".") + (is_index ? "*" : part);
    at = end + 1;
  }
  return result;
}

std::string json_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result + '"';
}

// Shortens `text` to the `width` of a table column.
std::string shortened(const std::string& text, std::size_t width) {
  return text.size() <= width ? text : text.substr(0, width - 3) + "...";
}

std::string kernel_label(const std::string& name) {
  // "void mica::kernels::(anonymous namespace)::softmax<float>(…)" without the common parts.
  std::string label = name;
  for (const char* const noise : {"void ", "mica::kernels::", "mica::", "(anonymous namespace)::", "__nv_bfloat16"}) {
    for (std::size_t at = label.find(noise); at != std::string::npos; at = label.find(noise)) {
      label.replace(at, std::string(noise).size(), noise == std::string("__nv_bfloat16") ? "bf16" : "");
    }
  }
  return label.substr(0, label.find('('));
}

/// One run of an op or range.
struct Run {
  std::string op;
  OpObserver::Phase phase;
  std::shared_ptr<ModuleName> module;
  std::size_t outermost;  // the outermost enclosing run, possibly itself
  int depth;
  std::int64_t start_ns;
  std::int64_t end_ns = 0;
  std::int64_t launches = 0;
  std::int64_t allocated = 0;  // at the start; after the end, the difference
};

}  // namespace

struct Profiler::State final : OpObserver {
  explicit State(ProfilerOptions chosen) : options(chosen) {
    if (options.device && cuda_device_count() > 0) {
      trace = cuda::start_device_trace();
    }
    memory_of = trace != nullptr ? Device::cuda() : Device::cpu();
    source = trace != nullptr ? trace->source() : "";
    start_ns = cuda::trace_clock_ns();
    listening.emplace(*this);
  }

  // Notifies the profiler, from its construction to stop().
  class Listening final : cuda::LaunchObserver {
   public:
    explicit Listening(State& state)
        : state_(state), outer_(std::exchange(autograd::thread_state.op_observer, &state)) {}
    ~Listening() override {
      if (!may_end()) {
        mica::detail::ended_out_of_order("Profiler");
      }
      autograd::thread_state.op_observer = outer_;
    }
    Listening(const Listening&) = delete;
    Listening& operator=(const Listening&) = delete;

    bool may_end() const { return autograd::thread_state.op_observer == &state_ && state_.open.empty(); }

    void launched(const char*) override {
      if (state_.open.empty()) {
        ++state_.launches_outside;
      } else {
        ++state_.runs[state_.open.front()].launches;
      }
    }

   private:
    State& state_;
    OpObserver* outer_;
  };

  void begin(const std::string& op, Phase phase, const std::shared_ptr<ModuleName>& module) override {
    const std::size_t number = runs.size();
    if (trace != nullptr) {
      trace->push(number + 1);
    }
    if (options.nvtx) {
      const std::string path = module == nullptr ? "" : autograd::path_of(*module);
      cuda::nvtx_push(
          fmt::format("{}{}{}{}", path, path.empty() ? "" : " ", op, phase == Phase::backward ? " backward" : ""));
    }
    runs.push_back({.op = op,
                    .phase = phase,
                    .module = module,
                    .outermost = open.empty() ? number : open.front(),
                    .depth = static_cast<int>(open.size()),
                    .start_ns = cuda::trace_clock_ns(),
                    .allocated = allocated()});
    open.push_back(number);
  }

  void end() override {
    if (open.empty()) {
      return;  // it began before the profiler
    }
    Run& run = runs[open.back()];
    open.pop_back();
    run.end_ns = cuda::trace_clock_ns();
    run.allocated = allocated() - run.allocated;
    if (options.nvtx) {
      cuda::nvtx_pop();
    }
    if (trace != nullptr) {
      trace->pop();
    }
  }

  std::int64_t allocated() const { return static_cast<std::int64_t>(memory_stats(memory_of).allocated); }

  void stop();
  void sum_up();

  const ProfilerOptions options;
  std::unique_ptr<cuda::DeviceTrace> trace;
  Device memory_of;
  std::string source;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t steps = 0;
  std::vector<std::int64_t> step_ends_ns;
  std::int64_t launches_outside = 0;
  std::vector<Run> runs;
  std::vector<std::size_t> open;
  std::vector<cuda::DeviceWork> work;
  std::optional<Listening> listening;  // until stop()

  // The results.
  std::vector<ProfiledOp> ops;
  std::vector<ProfiledKernel> kernels;
  double busy_ms = 0;
};

void Profiler::State::stop() {
  if (!listening) {
    return;
  }
  check(autograd::thread_state.op_observer == this,
        "profiler: stop was called on another thread, or before a profiler that was started later was stopped");
  check(open.empty(), "profiler: stop was called inside an op or a ProfileRange");
  listening.reset();
  if (trace != nullptr) {
    work = trace->stop();
    trace.reset();
  }
  end_ns = cuda::trace_clock_ns();
  sum_up();
}

void Profiler::State::sum_up() {
  std::map<std::tuple<std::string, Phase, std::string>, ProfiledOp> by_op;
  const auto entry = [&](const std::string& op, Phase phase, const std::string& module) -> ProfiledOp& {
    ProfiledOp& found = by_op[{op, phase, module}];
    found.op = op;
    found.phase = name_of(phase);
    found.module = module;
    return found;
  };
  std::vector<ProfiledOp*> of_run(runs.size(), nullptr);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    if (run.outermost != i) {
      continue;
    }
    ProfiledOp& op = entry(run.op, run.phase, run.module == nullptr ? "" : autograd::path_of(*run.module));
    ++op.calls;
    op.launches += run.launches;
    op.host_ms += static_cast<double>(run.end_ns - run.start_ns) / kPerMs;
    op.bytes_kept += run.allocated;
    of_run[i] = &op;
  }
  std::map<std::string, ProfiledKernel> by_kernel;
  std::int64_t busy_until = 0, busy_ns = 0;
  for (const cuda::DeviceWork& item : work) {
    const double ms = static_cast<double>(item.end_ns - item.start_ns) / kPerMs;
    ProfiledOp* op = nullptr;
    if (item.range > 0 && item.range <= runs.size()) {
      op = of_run[runs[item.range - 1].outermost];
    }
    (op == nullptr ? entry("", Phase::other, "") : *op).device_ms += ms;
    if (!item.name.empty()) {
      ProfiledKernel& kernel = by_kernel[item.name];
      kernel.name = item.name;
      ++kernel.calls;
      kernel.device_ms += ms;
    }
    busy_ns += std::max<std::int64_t>(0, item.end_ns - std::max(item.start_ns, busy_until));
    busy_until = std::max(busy_until, item.end_ns);
  }
  busy_ms = static_cast<double>(busy_ns) / kPerMs;
  if (launches_outside > 0) {
    entry("", Phase::other, "").launches += launches_outside;
  }
  ops = by_time(by_op, [this](const ProfiledOp& op) { return busy_ms > 0 ? op.device_ms : op.host_ms; });
  kernels = by_time(by_kernel, [](const ProfiledKernel& kernel) { return kernel.device_ms; });
}

Profiler::Profiler(ProfilerOptions options) : state_(std::make_unique<State>(options)) {}

Profiler::~Profiler() = default;

void Profiler::step() {
  ++state_->steps;
  state_->step_ends_ns.push_back(cuda::trace_clock_ns());
}

void Profiler::stop() { state_->stop(); }

const Profiler::State& Profiler::stopped(const char* function) const {
  check(!state_->listening, "profiler: call stop before {}", function);
  return *state_;
}

const std::vector<ProfiledOp>& Profiler::ops() const { return stopped("ops").ops; }
const std::vector<ProfiledKernel>& Profiler::kernels() const { return stopped("kernels").kernels; }
std::int64_t Profiler::steps() const { return state_->steps; }
double Profiler::wall_ms() const {
  const State& s = stopped("wall_ms");
  return static_cast<double>(s.end_ns - s.start_ns) / kPerMs;
}
double Profiler::device_busy_ms() const { return stopped("device_busy_ms").busy_ms; }
const std::string& Profiler::device_source() const { return state_->source; }

namespace {

/// The summed costs of all ops with the same label.
struct Sums {
  std::string label;
  ProfiledOp sum;
};

std::vector<Sums> grouped(const std::vector<ProfiledOp>& ops, std::string (*label)(const ProfiledOp&), bool by_device) {
  std::map<std::string, Sums> groups;
  for (const ProfiledOp& op : ops) {
    auto& [name, sum] = groups[label(op)];
    name = label(op);
    sum.calls += op.calls;
    sum.launches += op.launches;
    sum.host_ms += op.host_ms;
    sum.device_ms += op.device_ms;
    sum.bytes_kept += op.bytes_kept;
  }
  return by_time(groups,
                 [by_device](const Sums& group) { return by_device ? group.sum.device_ms : group.sum.host_ms; });
}

std::string op_label(const ProfiledOp& op) {
  return op.op.empty() ? "(outside of ops)" : op.phase == "backward" ? op.op + " backward" : op.op;
}

std::string module_label(const ProfiledOp& op) {
  const std::string path = without_indices(op.module);
  return (path.empty() ? "(no module)" : path) + (op.phase == "backward" ? " backward" : "");
}

}  // namespace

std::string Profiler::table(int rows) const {
  const State& s = stopped("table");
  const auto steps = static_cast<double>(std::max<std::int64_t>(1, s.steps));
  const bool by_device = s.busy_ms > 0;
  const double wall = wall_ms();
  const double whole = by_device ? s.busy_ms : wall;  // the total for the shares
  std::string text = fmt::format("{} step{}, {:.3f} ms each", s.steps, s.steps == 1 ? "" : "s", wall / steps);
  if (by_device) {
    text += fmt::format("; the GPU was busy for {:.3f} ms of it ({:.1f} %), by {}", s.busy_ms / steps,
                        100 * s.busy_ms / wall, s.source);
  }
  text += '\n';

  constexpr std::size_t kWidth = 44;
  const auto section = [&](const char* title, const std::vector<Sums>& groups) {
    text += fmt::format("\n{:<{}} {:>8} {:>9} {:>10} {:>10} {:>7} {:>10}\n", title, kWidth, "calls", "launches",
                        "host ms", "device ms", "share", "MiB kept");
    int shown = 0;
    for (const Sums& group : groups) {
      if (shown++ == rows) {
        break;
      }
      const ProfiledOp& sum = group.sum;
      text += fmt::format("{:<{}} {:>8.1f} {:>9.1f} {:>10.3f} {:>10.3f} {:>6.1f}% {:>10.2f}\n",
                          shortened(group.label, kWidth), kWidth, static_cast<double>(sum.calls) / steps,
                          static_cast<double>(sum.launches) / steps, sum.host_ms / steps, sum.device_ms / steps,
                          100 * (by_device ? sum.device_ms : sum.host_ms) / whole,
                          static_cast<double>(sum.bytes_kept) / steps / 0x1p20);
    }
  };
  section("op", grouped(s.ops, op_label, by_device));
  section("module", grouped(s.ops, module_label, by_device));
  if (!s.kernels.empty()) {
    text += fmt::format("\n{:<90} {:>8} {:>10} {:>7}\n", "kernel", "calls", "device ms", "share");
    int shown = 0;
    for (const ProfiledKernel& kernel : s.kernels) {
      if (shown++ == rows) {
        break;
      }
      text += fmt::format("{:<90} {:>8.1f} {:>10.3f} {:>6.1f}%\n", shortened(kernel_label(kernel.name), 90),
                          static_cast<double>(kernel.calls) / steps, kernel.device_ms / steps,
                          100 * kernel.device_ms / whole);
    }
  }
  return text;
}

void Profiler::write_trace(const std::filesystem::path& path) const {
  const State& s = stopped("write_trace");
  // Opening a FIFO would wait for a reader.
  std::error_code ignored;
  const std::filesystem::file_status existing = std::filesystem::status(path, ignored);
  check(!std::filesystem::exists(existing) || std::filesystem::is_regular_file(existing),
        "profiler: {} is not a regular file", path.string());
  std::ofstream file(path, std::ios::trunc);
  check(file.is_open(), "profiler: cannot write to {}: {}", path.string(), std::generic_category().message(errno));
  // Times in microseconds since the start. Thread 1 is the host; each stream of the device is another thread.
  const auto micros = [&](std::int64_t ns) { return static_cast<double>(ns - s.start_ns) / 1e3; };
  file << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n"
       << R"({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "host"}},)" << '\n'
       << R"({"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "GPU"}})";
  std::map<std::uint32_t, bool> is_of_collectives;  // by stream
  for (const cuda::DeviceWork& item : s.work) {
    bool& only = is_of_collectives.try_emplace(item.stream, true).first->second;
    only = only && item.name.starts_with("nccl");
  }
  for (const auto& [stream, only] : is_of_collectives) {
    file << fmt::format(
        ",\n{{\"ph\": \"M\", \"pid\": 2, \"tid\": {}, \"name\": \"thread_name\", \"args\": {{\"name\": \"{} {}\"}}}}",
        stream, only ? "collectives, stream" : "stream", stream);
  }
  for (const Run& run : s.runs) {
    file << fmt::format(
        ",\n{{\"ph\": \"X\", \"pid\": 1, \"tid\": 1, \"cat\": \"{}\", \"name\": {}, \"ts\": {:.3f}, \"dur\": {:.3f}, "
        "\"args\": {{\"module\": {}}}}}",
        name_of(run.phase), json_string(run.phase == OpObserver::Phase::backward ? run.op + " backward" : run.op),
        micros(run.start_ns), static_cast<double>(run.end_ns - run.start_ns) / 1e3,
        json_string(run.module == nullptr ? "" : autograd::path_of(*run.module)));
  }
  for (const cuda::DeviceWork& item : s.work) {
    const Run* const run = item.range > 0 && item.range <= s.runs.size() ? &s.runs[item.range - 1] : nullptr;
    file << fmt::format(
        ",\n{{\"ph\": \"X\", \"pid\": 2, \"tid\": {}, \"cat\": \"device\", \"name\": {}, \"ts\": {:.3f}, \"dur\": "
        "{:.3f}, \"args\": {{\"op\": {}, \"bytes\": {}}}}}",
        item.stream, json_string(item.name.empty() ? (run == nullptr ? "" : run->op) : item.name),
        micros(item.start_ns), static_cast<double>(item.end_ns - item.start_ns) / 1e3,
        json_string(run == nullptr ? "" : run->op), item.bytes);
  }
  std::int64_t number = 0;
  for (const std::int64_t end : s.step_ends_ns) {
    file << fmt::format(
        ",\n{{\"ph\": \"i\", \"pid\": 1, \"tid\": 1, \"s\": \"g\", \"name\": \"end of step {}\", \"ts\": {:.3f}}}",
        ++number, micros(end));
  }
  file << "\n]}\n";
  errno = 0;
  file.flush();
  check(file.good(), "profiler: cannot write to {}{}", path.string(),
        errno == 0 ? "" : ": " + std::generic_category().message(errno));
}

ProfileRange::ProfileRange(const char* name) : observer_(autograd::thread_state.op_observer) {
  check(name != nullptr, "ProfileRange: expected a name, got a null pointer");
  if (observer_ != nullptr) {
    observer_->begin(name, OpObserver::Phase::other, nullptr);
  }
}

ProfileRange::~ProfileRange() {
  if (observer_ != nullptr) {
    observer_->end();
  }
}

}  // namespace mica
