#include "examples/train_transformer/resuming.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/creation.h>
#include <mica/io/permutation.h>

using namespace mica;

namespace {

constexpr const char* program = "train_transformer";

// A fingerprint of pieces spread over the data; of a small text, all tokens.
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
  io::Metadata settings{{"steps", text(o.steps)},
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
                        {"eval-every", text(o.eval_every)},
                        {"seed", text(o.seed)},
                        {"dtype", text(dtype)},
                        {"tf32", text(o.tf32)},
                        {"device", device.is_cpu() ? "cpu" : "cuda"},
                        {"vocab", text(vocab)},
                        {"documents", o.documents},
                        {"data", fingerprint(tokens)}};
  if (o.reduce_float32) {
    settings["reduce-float32"] = "true";
  }
  if (o.ema > 0) {
    settings["ema"] = text(o.ema);
  }
  return settings;
}

Checkpoints::Checkpoints(const Options& options, io::Metadata settings, const dist::Group& group)
    : run_(program,
           {.folder = options.checkpoint,
            .every = options.checkpoint_every,
            .keep = options.keep,
            .resume = options.resume},
           std::move(settings),
           {.changed = {"steps", "eval-every"},
            .kept = options.warmup_given ? std::vector<std::string>{} : std::vector<std::string>{"warmup"}},
           group) {}

std::optional<Best> Checkpoints::resume(Trainer& trainer) {
  std::optional<Best> result;
  run_.resume([&](const io::TrainingCheckpoint& saved) {
    const StateDict& best = saved.part("best");
    check(best.contains("step") && best.contains("loss"), "it was not written by {}", program);
    trainer.resume(saved);
    result = Best{static_cast<std::int64_t>(best.at("step").item()), best.at("loss").item()};
  });
  return result;
}

void Checkpoints::save(const Trainer& trainer, const Best& best) {
  io::TrainingCheckpoint checkpoint = trainer.checkpoint();
  checkpoint.parts["best"] = {{"step", from_data({best.step}, Shape{})}, {"loss", from_data({best.loss}, Shape{})}};
  run_.save(std::move(checkpoint));
}
