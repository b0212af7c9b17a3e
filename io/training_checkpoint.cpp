#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/async_copy.h>
#include <mica/core/detail/callable.h>
#include <mica/core/progress.h>
#include <mica/io/detail/checksum.h>
#include <mica/io/file.h>
#include <mica/io/training_checkpoint.h>

namespace mica::io {

namespace {

namespace fs = std::filesystem;

// Names in the metadata. The names of settings have a prefix.
constexpr const char* kFormat = "format";
constexpr const char* kStep = "step";
constexpr const char* kSeed = "random.seed";
constexpr const char* kOffset = "random.offset";
constexpr const char* kEpoch = "data.epoch";
constexpr const char* kIndex = "data.index";
constexpr const char* kChecksum = "checksum";
constexpr std::string_view kSetting = "setting.";

constexpr const char* kThisFormat = "mica training checkpoint 1";

using detail::Checksum;

/// Adds all metadata except the checksum itself.
void add(Checksum& sum, const Metadata& metadata) {
  for (const auto& [name, value] : metadata) {
    if (name != kChecksum) {
      sum.add(name);
      sum.add(value);
    }
  }
}

/// The checksum of contiguous tensors on the CPU, and of the metadata without the checksum itself.
std::string checksum_of(const StateDict& tensors, const Metadata& metadata) {
  Checksum sum;
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    bytes += static_cast<std::int64_t>(tensor.bytes());
  }
  ProgressTask progress("computing the checksum", bytes);
  for (const auto& [name, tensor] : tensors) {
    sum.add(name, tensor);
    progress.advance(static_cast<std::int64_t>(tensor.bytes()));
  }
  add(sum, metadata);
  return sum.text();
}

Metadata metadata_of(const TrainingCheckpoint& checkpoint) {
  check(checkpoint.step >= 0 && checkpoint.data.epoch >= 0 && checkpoint.data.index >= 0,
        "training checkpoint: expected a step and a position of at least 0, got step {}, epoch {}, index {}",
        checkpoint.step, checkpoint.data.epoch, checkpoint.data.index);
  check(checkpoint.random.offset % 4 == 0 && checkpoint.random.start == nullptr,
        "training checkpoint: expected rng_state() as random, got a key with the offset {}{}", checkpoint.random.offset,
        checkpoint.random.start == nullptr ? "" : " in a captured graph");
  Metadata metadata{{kFormat, kThisFormat},
                    {kStep, fmt::format("{}", checkpoint.step)},
                    {kSeed, fmt::format("{}", checkpoint.random.seed)},
                    {kOffset, fmt::format("{}", checkpoint.random.offset)},
                    {kEpoch, fmt::format("{}", checkpoint.data.epoch)},
                    {kIndex, fmt::format("{}", checkpoint.data.index)}};
  for (const auto& [name, value] : checkpoint.settings) {
    metadata.emplace(std::string(kSetting) + name, value);
  }
  return metadata;
}

/// The tensors of all parts by their names in the file. A tensor that has several names in a part (tied weights) is
/// stored under the first.
StateDict tensors_of(const TrainingCheckpoint& checkpoint) {
  StateDict tensors;
  for (const auto& [part, state] : checkpoint.parts) {
    check(!part.empty() && part.find('.') == std::string::npos,
          "training checkpoint: expected names of parts without a dot, got \"{}\"", part);
    std::set<std::pair<const void*, std::string>> seen;
    for (const auto& [name, tensor] : state) {
      check(tensor.defined(), "training checkpoint: \"{}.{}\" is an undefined tensor", part, name);
      if (tensor.numel() == 0 ||
          seen.emplace(tensor.raw_data(), fmt::format("{} {} {}", tensor.dtype(), tensor.shape(), tensor.strides()))
              .second) {
        tensors.emplace(fmt::format("{}.{}", part, name), tensor);
      }
    }
  }
  return tensors;
}

/// Writes the file. `tensors` are on the CPU and contiguous.
void write(const fs::path& path, const StateDict& tensors, Metadata metadata) {
  metadata[kChecksum] = checksum_of(tensors, metadata);
  save(path, tensors, metadata);
}

/// Reads the metadata of one file.
class MetadataReader {
 public:
  explicit MetadataReader(const fs::path& path) : path_(path), metadata_(load_metadata(path)) {
    const auto format = metadata_.find(kFormat);
    require(format != metadata_.end() && format->second.starts_with("mica training checkpoint "),
            "it is another kind of file");
    require(format->second == kThisFormat, "it is a \"{}\", expected \"{}\"", format->second, kThisFormat);
    (void)text(kChecksum);
  }

  const Metadata& metadata() const { return metadata_; }

  /// Everything but the tensors.
  TrainingCheckpoint checkpoint() const {
    TrainingCheckpoint result;
    result.step = number<std::int64_t>(kStep);
    result.random = {.seed = number<std::uint64_t>(kSeed), .offset = number<std::uint64_t>(kOffset)};
    require(result.random.offset % 4 == 0, "its {} is not a multiple of 4", kOffset);
    result.data = {.epoch = number<std::int64_t>(kEpoch), .index = number<std::int64_t>(kIndex)};
    for (const auto& [name, value] : metadata_) {
      if (name.starts_with(kSetting)) {
        result.settings.emplace(name.substr(kSetting.size()), value);
      } else {
        require(std::find(kNames.begin(), kNames.end(), name) != kNames.end(), "it has an unexpected \"{}\"", name);
      }
    }
    return result;
  }

  template <class... Args>
  void require(bool ok, fmt::format_string<Args...> message, Args&&... args) const {
    if (!ok) {
      fail("load: {} is not a whole training checkpoint: {}", path_.string(),
           fmt::format(message, std::forward<Args>(args)...));
    }
  }

 private:
  static constexpr std::array<std::string_view, 7> kNames{kFormat, kStep, kSeed, kOffset, kEpoch, kIndex, kChecksum};

  const std::string& text(const char* name) const {
    const auto found = metadata_.find(name);
    require(found != metadata_.end(), "it has no {}", name);
    return found->second;
  }

  // Parses an integer that is not negative.
  template <class T>
  T number(const char* name) const {
    const std::string& digits = text(name);
    T value = 0;
    const char* const last = digits.data() + digits.size();
    const auto [end, error] = std::from_chars(digits.data(), last, value);
    require(error == std::errc() && end == last && value >= T{0}, "its {} is \"{}\"", name, digits);
    return value;
  }

  fs::path path_;
  Metadata metadata_;
};

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kSuffix = ".safetensors";

std::string name_of(std::int64_t step) { return fmt::format("{}{:09}{}", kPrefix, step, kSuffix); }

/// The step of a file of this name; nullopt if it is not the name of a checkpoint.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) || name.size() < kPrefix.size() + kSuffix.size()) {
    return std::nullopt;
  }
  std::int64_t step = 0;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size() - kSuffix.size(), step);
  return step >= 0 && name == name_of(step) ? std::optional(step) : std::nullopt;
}

/// The steps of all files with the name of a checkpoint, the newest first.
std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (const std::optional<std::int64_t> step = step_of(at->path().filename().string())) {
      steps.push_back(*step);
    }
  }
  check(!error, "checkpoints: cannot list {}: {}", folder.string(), error.message());
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

/// Removes complete checkpoints except the newest `keep`, one of which is `newest`. Incomplete files are kept, and do
/// not count: they may be all that is left of a run.
void remove_old(const fs::path& folder, std::int64_t newest, int keep) {
  int kept = 1;
  for (const std::int64_t step : steps_in(folder)) {
    const fs::path path = folder / name_of(step);
    if (step >= newest) {
      continue;
    }
    try {
      (void)MetadataReader(path).checkpoint();
    } catch (const OutOfMemory&) {
      throw;
    } catch (const Error&) {
      continue;
    }
    if (kept < keep) {
      ++kept;
      continue;
    }
    std::error_code error;
    fs::remove(path, error);
    check(!error, "checkpoints: cannot remove {}: {}", path.string(), error.message());
  }
}

/// Copies of tensors in host memory. The memory is reused by the next snapshot.
class Snapshot {
 public:
  /// Copies `tensors`, which may be changed after the return. Copies from GPUs are complete only after wait().
  void take(const StateDict& tensors) {
    std::map<int, std::pair<Tensors, Tensors>> by_gpu;  // destinations and sources
    StateDict copies;
    std::map<std::string, Device> devices;
    for (const auto& [name, tensor] : tensors) {
      const Tensor copy = memory_for(name, tensor);
      copies.emplace(name, copy);
      devices.emplace(name, tensor.device());
      if (tensor.device().is_cpu()) {
        copy_into(copy, tensor);
      } else {
        auto& [to, from] = by_gpu[tensor.device().index];
        to.push_back(copy);
        from.push_back(contiguous_data(tensor));
      }
    }
    tensors_ = std::move(copies);
    devices_ = std::move(devices);
    for (const auto& [gpu, pairs] : by_gpu) {
      const auto stream = streams_.try_emplace(gpu, Device::cuda(gpu)).first;
      pending_.push_back(stream->second.start(pairs.first, pairs.second));
      pending_.back().order();
    }
  }

  /// Waits for the copies. May be called on any thread.
  void wait() {
    for (const AsyncCopy& copy : pending_) {
      copy.wait();
    }
    pending_.clear();
  }

  const StateDict& tensors() const { return tensors_; }

 private:
  // The memory of the last copy of this name, if it fits; otherwise new memory.
  Tensor memory_for(const std::string& name, const Tensor& tensor) const {
    const auto last = tensors_.find(name);
    const auto device = devices_.find(name);
    const bool fits = last != tensors_.end() && last->second.shape() == tensor.shape() &&
                      last->second.dtype() == tensor.dtype() && device->second == tensor.device();
    return fits ? last->second : pinned_empty(tensor.shape(), tensor.dtype(), tensor.device());
  }

  StateDict tensors_;
  std::map<std::string, Device> devices_;  // from which the tensor of each name was copied
  std::map<int, CopyStream> streams_;
  std::vector<AsyncCopy> pending_;
};

}  // namespace

const StateDict& TrainingCheckpoint::part(const std::string& name) const {
  static const StateDict none;
  const auto found = parts.find(name);
  return found == parts.end() ? none : found->second;
}

void save_training_checkpoint(const fs::path& path, const TrainingCheckpoint& checkpoint) {
  Snapshot snapshot;
  snapshot.take(tensors_of(checkpoint));
  snapshot.wait();
  write(path, snapshot.tensors(), metadata_of(checkpoint));
}

TrainingCheckpoint load_training_checkpoint(const fs::path& path) {
  const MetadataReader reader(path);
  TrainingCheckpoint result = reader.checkpoint();
  const StateDict tensors = load(path);
  reader.require(reader.metadata().at(kChecksum) == checksum_of(tensors, reader.metadata()),
                 "its checksum does not match its contents");
  for (const auto& [name, tensor] : tensors) {
    const std::size_t dot = name.find('.');
    reader.require(dot != std::string::npos && dot > 0, "its tensor \"{}\" belongs to no part", name);
    result.parts[name.substr(0, dot)].emplace(name.substr(dot + 1), tensor);
  }
  return result;
}

std::string fingerprint(const StateDict& tensors, const Metadata& about) {
  std::int64_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    check(tensor.defined(), "fingerprint: \"{}\" is an undefined tensor", name);
    total += static_cast<std::int64_t>(tensor.bytes());
  }
  Checksum sum;
  ProgressTask progress("taking a fingerprint", total);
  for (const auto& [name, tensor] : tensors) {
    Tensor host = tensor;
    if (!host.device().is_cpu() || !host.is_contiguous()) {
      host = empty(tensor.shape(), tensor.dtype());
      copy_into(host, tensor);
    }
    sum.add(name, host);
    progress.advance(static_cast<std::int64_t>(host.bytes()));
  }
  add(sum, about);
  return sum.text();
}

void check_settings(const Metadata& saved, const Metadata& current) {
  std::string differences;
  for (const auto& [name, value] : saved) {
    const auto now = current.find(name);
    if (now == current.end()) {
      differences += fmt::format("\n  {}: {} in the checkpoint, not set now", name, value);
    } else if (now->second != value) {
      differences += fmt::format("\n  {}: {} in the checkpoint, {} now", name, value, now->second);
    }
  }
  for (const auto& [name, value] : current) {
    if (!saved.contains(name)) {
      differences += fmt::format("\n  {}: not set in the checkpoint, {} now", name, value);
    }
  }
  check(differences.empty(), "the settings differ from the checkpoint's:{}", differences);
}

/// Writes snapshots on a thread of its own.
class CheckpointFolder::Writer {
 public:
  Writer(fs::path folder, int keep) : folder_(std::move(folder)), keep_(keep), thread_([this] { work(); }) {}

  ~Writer() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void start(const TrainingCheckpoint& checkpoint) {
    Metadata metadata = metadata_of(checkpoint);
    const StateDict tensors = tensors_of(checkpoint);
    wait();
    snapshot_.take(tensors);  // the thread is idle, so it does not read the snapshot
    {
      const std::lock_guard lock(mutex_);
      step_ = checkpoint.step;
      shown_ = {.task = fmt::format("writing the checkpoint of step {}", step_)};
      failure_.clear();
      metadata_ = std::move(metadata);
      writes_ = true;
    }
    changed_.notify_all();
  }

  bool writes() const {
    const std::lock_guard lock(mutex_);
    return writes_;
  }

  /// Reports the thread's progress as that of the calling thread.
  void wait() {
    std::optional<ProgressTask> progress;
    Shown last;
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return !writes_; })) {
      const Shown now = shown_;
      lock.unlock();  // while an observer is called
      if (!progress || now.task != last.task) {
        progress.reset();
        progress.emplace(now.task, now.total);
        last.done = 0;
      }
      progress->advance(now.done - last.done);
      last = now;
      lock.lock();
    }
  }

  std::string take_error() {
    const std::lock_guard lock(mutex_);
    return std::exchange(error_, {});
  }

  /// The error of the last write; empty if it succeeded.
  std::string failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  /// A report of the thread's progress.
  struct Shown {
    std::string task{};
    std::int64_t done = 0, total = 1;
  };

  void work() {
    const ProgressObserver observer([this](const ProgressReport& report) {
      const std::lock_guard lock(mutex_);
      shown_ = {.task = report.task, .done = report.done, .total = report.total};
    });
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return writes_ || stops_; });
      if (!writes_) {
        return;
      }
      lock.unlock();
      const std::string failure = write_snapshot();
      lock.lock();
      writes_ = false;
      failure_ = failure;
      if (!failure.empty()) {
        error_ = failure;
      }
      changed_.notify_all();
    }
  }

  // Returns the error message; empty on success.
  std::string write_snapshot() {
    try {
      snapshot_.wait();
      write(folder_ / name_of(step_), snapshot_.tensors(), std::move(metadata_));
      remove_old(folder_, step_, keep_);
      return {};
    } catch (const std::exception& error) {
      return fmt::format("checkpoint of step {}: {}", step_, error.what());
    }
  }

  const fs::path folder_;
  const int keep_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool writes_ = false;  // while true, the members after shown_ belong to the thread
  bool stops_ = false;
  std::string error_;    // of the last failed write, until take_error()
  std::string failure_;  // of the last write
  Shown shown_;

  std::int64_t step_ = 0;
  Metadata metadata_;
  Snapshot snapshot_;

  std::thread thread_;
};

CheckpointFolder::CheckpointFolder(const fs::path& path, Options options) : path_(path) {
  check(options.keep >= 1, "checkpoints: expected to keep at least 1, got {}", options.keep);
  std::error_code ignored;  // ignored: opening the folder reports the problem
  fs::create_directories(path, ignored);
  lock_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  check(lock_ >= 0, "checkpoints: cannot open the folder {}: {}", path.string(), error_text(errno));
  try {
    // Some network file systems do not support locks. Unfinished files there may belong to a run on another machine.
    const bool locked = ::flock(lock_, LOCK_EX | LOCK_NB) == 0;
    check(locked || errno != EWOULDBLOCK, "checkpoints: another process is using the folder {}", path.string());
    if (locked) {
      remove_unfinished(path, [](const std::string& name) { return step_of(name).has_value(); });
    }
    writer_ = std::make_unique<Writer>(path, options.keep);
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

CheckpointFolder::~CheckpointFolder() {
  writer_.reset();
  ::close(lock_);
}

const fs::path& CheckpointFolder::path() const { return path_; }

bool CheckpointFolder::has_files() const { return !steps_in(path_).empty(); }

std::optional<TrainingCheckpoint> CheckpointFolder::newest(const std::function<void(std::string_view)>& skipped) const {
  check_callable(skipped, "newest");
  for (const std::int64_t step : steps_in(path_)) {
    const fs::path path = path_ / name_of(step);
    try {
      TrainingCheckpoint checkpoint = load_training_checkpoint(path);
      check(checkpoint.step == step, "load: {} is a checkpoint of step {}", path.string(), checkpoint.step);
      return checkpoint;
    } catch (const OutOfMemory&) {
      throw;
    } catch (const Error& error) {
      skipped(error.what());
    }
  }
  return std::nullopt;
}

void CheckpointFolder::save(const TrainingCheckpoint& checkpoint) { writer_->start(checkpoint); }

bool CheckpointFolder::is_writing() const { return writer_->writes(); }

std::string CheckpointFolder::take_error() { return writer_->take_error(); }

void CheckpointFolder::finish() {
  writer_->wait();
  (void)writer_->take_error();
  const std::string failure = writer_->failure();
  check(failure.empty(), "{}", failure);
}

}  // namespace mica::io
