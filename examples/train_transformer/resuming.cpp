#include "examples/train_transformer/resuming.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/program.h"
#include <mica/core/creation.h>
#include <mica/io/permutation.h>

using namespace mica;

namespace {

constexpr const char* program = "train_transformer";

// Of tokens spread over the data: all of a small text's.
std::string fingerprint(const io::TokenView& tokens) {
  constexpr std::int64_t pieces = 256, length = 4096;
  std::vector<std::int64_t> piece(static_cast<std::size_t>(std::min(length, tokens.size())));
  const auto read = static_cast<std::int64_t>(piece.size());
  const std::int64_t last = tokens.size() - read;                // where the last piece begins
  const std::int64_t count = std::min(pieces, last / read + 2);  // at least 2
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.read(i * last / (count - 1), piece);
    for (const std::int64_t token : piece) {
      sum = io::mix_seeds(sum, static_cast<std::uint64_t>(token));
    }
  }
  return fmt::format("{} tokens, fingerprint {:016x}", tokens.size(), sum);
}

}  // namespace

io::Metadata settings_of(const Options& o, DType dtype, Device device, const io::TokenView& tokens,
                         std::int64_t vocab) {
  const auto text = [](auto value) { return fmt::format("{}", value); };
  return {{"steps", text(o.steps)},
          {"batch", text(o.batch)},
          {"accumulate", text(o.accumulate)},
          {"context", text(o.context)},
          {"layers", text(o.layers)},
          {"heads", text(o.heads)},
          {"width", text(o.width)},
          {"bias", text(o.bias)},
          {"dropout", text(o.dropout)},
          {"lr", text(o.lr)},
          {"min-lr", text(o.min_lr)},
          {"warmup", text(o.warmup)},
          {"beta2", text(o.beta2)},
          {"weight-decay", text(o.weight_decay)},
          {"clip", text(o.clip)},
          {"eval-every", text(o.eval_every)},  // the best model is one of those
          {"seed", text(o.seed)},
          {"dtype", text(dtype)},
          {"tf32", text(o.tf32)},
          {"device", device.is_cpu() ? "cpu" : "cuda"},
          {"vocab", text(vocab)},
          {"documents", o.documents},
          {"data", fingerprint(tokens)}};
}

Checkpoints::Checkpoints(const Options& options, io::Metadata settings)
    : settings_(std::move(settings)), every_(options.checkpoint_every) {
  if (options.checkpoint.empty()) {
    return;
  }
  folder_.emplace(options.checkpoint, io::CheckpointFolder::Options{.keep = options.keep});
  check(options.resume || !folder_->has_files(),
        "{} has checkpoints of another run: go on from them with --resume, or give another folder", options.checkpoint);
}

std::optional<Best> Checkpoints::resume(Trainer& trainer) {
  if (!on()) {
    return std::nullopt;
  }
  const std::string folder = folder_->path().string();
  const std::optional<io::TrainingCheckpoint> saved = folder_->newest(
      [](std::string_view why) { print_error(program, fmt::format("skipped a checkpoint: {}", why), 0); });
  if (!saved) {
    return std::nullopt;
  }
  try {
    io::check_settings(saved->settings, settings_);
    const StateDict& best = saved->part("best");
    check(best.contains("step") && best.contains("loss"), "it was not written by {}", program);
    trainer.resume(*saved);
    return Best{static_cast<std::int64_t>(best.at("step").item()), best.at("loss").item()};
  } catch (const Error& error) {
    fail("cannot resume from the checkpoint of step {} in {}: {}", saved->step, folder, error.what());
  }
}

bool Checkpoints::is_due(std::int64_t number) {
  due_ = on() && (due_ || number % every_ == 0);
  return due_ && !folder_->is_writing();
}

void Checkpoints::save(const Trainer& trainer, const Best& best) {
  io::TrainingCheckpoint checkpoint = trainer.checkpoint();
  checkpoint.settings = settings_;
  checkpoint.parts["best"] = {{"step", from_data({best.step}, Shape{})}, {"loss", from_data({best.loss}, Shape{})}};
  folder_->save(checkpoint);
  due_ = false;
  report();
}

void Checkpoints::finish() {
  if (on()) {
    folder_->finish();
  }
}

void Checkpoints::report() {
  if (const std::string error = folder_->take_error(); !error.empty()) {
    print_error(program, error + "; training goes on", 0);
  }
}
