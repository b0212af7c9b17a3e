#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include <mica/io/file.h>
#include <mica/io/json.h>
#include <mica/io/text.h>
#include <mica/train/detail/loss_plot.h>
#include <mica/train/metrics_log.h>

namespace mica::train {

namespace {

// A loss in a line of metrics; nothing if it is missing. JSON has no NaN and no infinities: they are null.
std::optional<double> loss_in(const io::JsonValue& line, const char* name, const std::string& where) {
  const io::JsonValue* const entry = line.find(name);
  if (entry == nullptr) {
    return std::nullopt;
  }
  if (entry->is_null()) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto* const whole = entry->as<std::int64_t>();
  const auto* const loss = entry->as<double>();
  check(whole != nullptr || loss != nullptr, "{}: expected a number \"{}\"", where, name);
  return whole != nullptr ? static_cast<double>(*whole) : *loss;
}

}  // namespace

MetricsLog::MetricsLog(MetricsOptions options) : options_(std::move(options)) {
  if (!options_.folder.empty()) {
    io::make_folder(options_.folder, "MetricsLog");
    io::remove_unfinished(options_.folder,
                          [](const std::string& name) { return name == "metrics.jsonl" || name == "loss.svg"; });
    keep_metrics();
    const std::filesystem::path path = options_.folder / "metrics.jsonl";
    file_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    check(file_ >= 0, "cannot write {}: {}", path.string(), io::error_text(errno));
  }
  if (!options_.tensorboard.empty()) {
    events_.emplace(options_.tensorboard, io::EventWriterOptions{.resumed_at = options_.resumed_at});
  }
}

MetricsLog::~MetricsLog() {
  if (file_ >= 0) {
    ::close(file_);
  }
}

void MetricsLog::add(const StepMetrics& metrics) {
  const std::string speed = options_.unit + "_per_second";
  remember(metrics.step, metrics.train_loss, metrics.validation_loss);
  if (file_ >= 0) {
    nlohmann::ordered_json line{{"step", metrics.step},
                                {"train_loss", metrics.train_loss},
                                {"lr", metrics.lr},
                                {"grad_norm", metrics.grad_norm},
                                {speed, metrics.speed.units_per_second},
                                {"step_ms", 1e3 * metrics.seconds},
                                {"peak_memory_bytes", metrics.speed.peak_memory}};
    if (metrics.speed.share_of_peak) {
      line["share_of_peak"] = *metrics.speed.share_of_peak;
    }
    if (metrics.validation_loss) {
      line["val_loss"] = *metrics.validation_loss;
    }
    io::append("metrics", file_, line.dump() + '\n', options_.folder / "metrics.jsonl");
  }
  scalar("loss/train", metrics.train_loss, metrics.step);
  scalar("lr", metrics.lr, metrics.step);
  scalar("grad_norm", metrics.grad_norm, metrics.step);
  scalar(speed, metrics.speed.units_per_second, metrics.step);
  if (metrics.validation_loss) {
    scalar("loss/validation", *metrics.validation_loss, metrics.step);
  }
}

void MetricsLog::draw_losses() const {
  if (file_ >= 0) {
    io::write_text(options_.folder / "loss.svg", detail::loss_plot(training_, validation_));
  }
}

void MetricsLog::scalar(std::string_view tag, double value, std::int64_t step) {
  if (events_) {
    events_->scalar(tag, value, step);
  }
}

void MetricsLog::text(std::string_view tag, std::string_view text) {
  if (events_) {
    events_->text(tag, text, 0);
  }
}

void MetricsLog::histograms(const nn::Module& model, std::int64_t step) {
  if (!events_) {
    return;
  }
  for (const auto& [name, parameter] : model.named_parameters()) {
    if (parameter.requires_grad()) {
      events_->histogram("weights/" + name, parameter.detach(), step);
    }
  }
}

// For the plot.
void MetricsLog::remember(std::int64_t step, double train_loss, std::optional<double> validation_loss) {
  const auto x = static_cast<double>(step);
  training_.push_back({x, train_loss});
  if (validation_loss) {
    validation_.push_back({x, *validation_loss});
  }
}

// Refuses a FIFO, since opening one would block until it is read.
void MetricsLog::keep_metrics() {
  const std::filesystem::path path = options_.folder / "metrics.jsonl";
  const std::string text = options_.steps_done > 0 && io::is_there(path) ? io::read_text(path) : "";
  std::size_t kept = 0;
  std::int64_t number = 0;
  // An incomplete last line was being written when the run was stopped.
  for (std::size_t end = 0; (end = text.find('\n', kept)) != std::string::npos; kept = end + 1) {
    const std::string where = fmt::format("{}, line {}", path.string(), ++number);
    constexpr std::size_t longest = 65536;
    check(end - kept <= longest, "{}: it has {} bytes, expected at most {}", where, end - kept, longest);
    const io::JsonValue line = io::parse_json(std::string_view(text).substr(kept, end - kept), where);
    const io::JsonValue* const entry = line.find("step");
    const auto* const step = entry != nullptr ? entry->as<std::int64_t>() : nullptr;
    check(step != nullptr && *step > 0, "{}: expected an integer \"step\" of at least 1", where);
    if (*step > options_.steps_done) {
      break;
    }
    const std::optional<double> train_loss = loss_in(line, "train_loss", where);
    check(train_loss.has_value(), "{}: \"train_loss\" is missing", where);
    remember(*step, *train_loss, loss_in(line, "val_loss", where));
  }
  io::write_text(path, std::string_view(text).substr(0, kept));
}

}  // namespace mica::train
