#include "examples/common/checkpoints.h"

#include <fmt/core.h>

#include <utility>

#include "examples/common/program.h"

using namespace mica;

RunCheckpoints::RunCheckpoints(const char* program, const CheckpointOptions& options, io::Metadata settings)
    : program_(program), settings_(std::move(settings)), every_(options.every) {
  if (options.folder.empty()) {
    return;
  }
  folder_.emplace(options.folder, io::CheckpointFolder::Options{.keep = options.keep});
  check(options.resume || !folder_->has_files(),
        "{} has checkpoints of another run: go on from them with --resume, or give another folder", options.folder);
}

bool RunCheckpoints::resume(const std::function<void(const io::TrainingCheckpoint&)>& restore) {
  if (!on()) {
    return false;
  }
  const std::optional<io::TrainingCheckpoint> saved = folder_->newest(
      [&](std::string_view why) { print_error(program_, fmt::format("skipped a checkpoint: {}", why), 0); });
  if (!saved) {
    return false;
  }
  try {
    io::check_settings(saved->settings, settings_);
    restore(*saved);
  } catch (const Error& error) {
    fail("cannot resume from the checkpoint of step {} in {}: {}", saved->step, folder_->path().string(), error.what());
  }
  return true;
}

bool RunCheckpoints::is_due(std::int64_t number) {
  due_ = on() && (due_ || number % every_ == 0);
  return due_ && !folder_->is_writing();
}

void RunCheckpoints::save(io::TrainingCheckpoint checkpoint) {
  checkpoint.settings = settings_;
  folder_->save(checkpoint);
  due_ = false;
  if (const std::string error = folder_->take_error(); !error.empty()) {
    print_error(program_, error + "; training goes on", 0);
  }
}

void RunCheckpoints::finish() {
  if (on()) {
    folder_->finish();
  }
}
