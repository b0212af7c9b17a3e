#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

#include <mica/core/creation.h>
#include <mica/train/checkpoints.h>
#include <mica/train/detail/agreement.h>
#include <mica/train/detail/terminal.h>
#include <mica/train/ranks.h>

namespace mica::train {

namespace {

// Returns rank 0's checkpoint on every rank, with its tensors on the CPU. Nothing if rank 0 has none.
std::optional<io::TrainingCheckpoint> shared(const distributed::Group& group,
                                             std::optional<io::TrainingCheckpoint> saved) {
  if (group.size() == 1) {
    return saved;
  }
  nlohmann::json text;
  if (saved) {
    text = {{"step", saved->step},
            {"random", {saved->random.seed, saved->random.offset}},
            {"data", {saved->data.epoch, saved->data.index}},
            {"settings", saved->settings},
            {"parts", nlohmann::json::object()}};
    for (const auto& [part, state] : saved->parts) {
      nlohmann::json& tensors = text["parts"][part] = nlohmann::json::object();
      for (const auto& [name, tensor] : state) {
        tensors[name] = {static_cast<int>(tensor.dtype()),
                         std::vector<std::int64_t>(tensor.shape().begin(), tensor.shape().end())};
      }
    }
  }
  text = nlohmann::json::parse(detail::broadcast(group, text.dump()));
  if (text.is_null()) {
    return std::nullopt;
  }
  if (!saved) {
    saved.emplace();
    text["step"].get_to(saved->step);
    text["random"][0].get_to(saved->random.seed);
    text["random"][1].get_to(saved->random.offset);
    text["data"][0].get_to(saved->data.epoch);
    text["data"][1].get_to(saved->data.index);
    text["settings"].get_to(saved->settings);
    for (const auto& [part, tensors] : text["parts"].items()) {
      StateDict& state = saved->parts[part];
      for (const auto& [name, tensor] : tensors.items()) {
        const auto sizes = tensor[1].get<std::vector<std::int64_t>>();
        state[name] = empty(Shape(sizes), static_cast<DType>(tensor[0].get<int>()));
      }
    }
  }
  for (const auto& [part, state] : saved->parts) {
    for (const auto& [name, tensor] : state) {
      group.broadcast(tensor);
    }
  }
  return saved;
}

}  // namespace

std::int64_t number_of(const io::Metadata& settings, const std::string& name) {
  std::int64_t value = 0;
  const auto at = settings.find(name);
  const char* const end = at == settings.end() ? nullptr : at->second.data() + at->second.size();
  check(end != nullptr && std::from_chars(at->second.data(), end, value) == std::from_chars_result{end, std::errc()},
        "its settings have no whole number of {}", name);
  return value;
}

Checkpoints::Checkpoints(const CheckpointOptions& options, io::Metadata settings, ChangeableSettings changeable,
                         ProgramNames names, const distributed::Group& group)
    : names_(std::move(names)),
      group_(group),
      path_(options.folder),
      settings_(std::move(settings)),
      changeable_(std::move(changeable)),
      every_(options.every) {
  check(!on() || every_ >= 1, "Checkpoints: expected at least 1 step between checkpoints, got {}", every_);
  on_rank_0(group_, [&] {
    if (on()) {
      folder_.emplace(options.folder, io::CheckpointFolder::Options{.keep = options.keep});
      check(options.resume || !folder_->has_files(),
            "{} has checkpoints of another run: resume it with {}resume, or use another folder", options.folder,
            names_.prefix);
    }
  });
}

void Checkpoints::accept(const io::TrainingCheckpoint& saved) {
  io::Metadata expected = saved.settings;
  for (const std::string& name : changeable_.kept) {
    if (const auto at = expected.find(name); at != expected.end()) {
      settings_[name] = at->second;
    }
  }
  for (const std::string& name : changeable_.changed) {
    const auto at = expected.find(name);
    if (at != expected.end() && at->second != settings_.at(name)) {
      changes_ += fmt::format("{}: {} in the checkpoint, {} from now on\n", name, at->second, settings_.at(name));
      at->second = settings_.at(name);
    }
  }
  io::check_settings(expected, settings_);
  if (const auto steps = settings_.find("steps"); steps != settings_.end()) {
    check(number_of(settings_, "steps") >= saved.step, "expected at least as many steps as were taken, got {}steps {}",
          names_.prefix, steps->second);
  }
}

bool Checkpoints::resume(const std::function<void(io::TrainingCheckpoint&)>& restore) {
  std::optional<io::TrainingCheckpoint> saved;
  // Name the checkpoint in the error.
  const auto with_it = [&](const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& error) {
      fail("cannot resume from the checkpoint of step {} in {}: {}", saved->step, path_, error.what());
    }
  };
  on_rank_0(group_, [&] {
    if (!on()) {
      return;
    }
    saved = folder_->newest(
        [&](std::string_view why) { detail::warn(names_.program, fmt::format("skipped a checkpoint: {}", why)); });
    if (saved) {
      with_it([&] { accept(*saved); });
    }
  });
  saved = shared(group_, std::move(saved));
  if (!saved) {
    return false;
  }
  with_it([&] { restore(*saved); });
  return true;
}

bool Checkpoints::is_due(std::int64_t number) {
  due_ = folder_ && (due_ || number % every_ == 0);
  return due_ && !folder_->is_writing();
}

void Checkpoints::save(io::TrainingCheckpoint checkpoint) {
  if (!folder_) {
    return;
  }
  checkpoint.settings = settings_;
  folder_->save(checkpoint);
  due_ = false;
  if (const std::string error = folder_->take_error(); !error.empty()) {
    detail::warn(names_.program, error + "; training continues");
  }
}

void Checkpoints::finish() {
  if (folder_) {
    folder_->finish();
  }
}

}  // namespace mica::train
