#include "examples/train_transformer/options.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "examples/common/command_line.h"
#include "examples/common/ranks.h"
#include <mica/nn/gpt.h>

namespace {

// GPT-2's sizes with half a million tokens per step, for ten billion tokens. Learning rates from GPT-3's paper (Brown
// et al., 2020, table 2.1), other settings from nanoGPT and llm.c.
Recipe gpt2_recipe(std::string_view size, std::int64_t batch, double lr) {
  const mica::nn::GPTConfig model = mica::nn::gpt2_config(size);
  return {.steps = 19000,
          .batch = batch,
          .context = model.context,
          .layers = model.layers,
          .heads = model.heads,
          .width = model.width,
          .bias = true,
          .dropout = 0,
          .lr = lr,
          .min_lr = lr / 10,
          .warmup = 700,
          .beta2 = 0.95,
          .sample = 0,
          .accumulate = (1 << 19) / (batch * model.context)};
}

const std::map<std::string, Recipe> recipes{
    {"gpt2-124m", gpt2_recipe("124m", 32, 6e-4)},
    {"gpt2-350m", gpt2_recipe("350m", 16, 3e-4)},
    {"gpt2-774m", gpt2_recipe("774m", 16, 2.5e-4)},
    {"gpt2-1558m", gpt2_recipe("1558m", 16, 2e-4)},
    // For the built-in text: takes at most two minutes on two cores.
    {"default",
     {.steps = 2000,
      .batch = 16,
      .context = 128,
      .layers = 4,
      .heads = 4,
      .width = 128,
      .dropout = 0,
      .lr = 2e-3,
      .min_lr = 1e-4,
      .warmup = 100,
      .sample = 600}},
    // The two character-level recipes of nanoGPT.
    {"shakespeare-cpu",
     {.steps = 2000,
      .batch = 12,
      .context = 64,
      .layers = 4,
      .heads = 4,
      .width = 128,
      .dropout = 0,
      .lr = 1e-3,
      .min_lr = 1e-4,
      .warmup = 100,
      .sample = 500}},
    {"shakespeare-gpu",
     {.steps = 5000,
      .batch = 64,
      .context = 256,
      .layers = 6,
      .heads = 6,
      .width = 384,
      .dropout = 0.2,
      .lr = 1e-3,
      .min_lr = 1e-4,
      .warmup = 100,
      .sample = 500}},
};

/// The options given on the command line; the preset supplies the others.
class GivenOptions {
 public:
  GivenOptions();

  /// Throws UsageError if the settings do not fit together.
  Options options() const;

  CommandLine command_line;

 private:
  std::string preset_ = "default";
  std::string data_;
  std::string documents_ = "none";
  std::string device_ = "auto";
  int gpus_ = 0;
  std::string out_ = "out";
  std::uint64_t seed_ = 1;
  int threads_ = 0;
  int workers_ = 1;
  double ema_ = 0;
  bool recompute_ = false;
  bool zero_ = false;
  bool reduce_float32_ = false;
  bool check_gradients_ = false;
  bool tf32_ = false;
  bool no_cuda_graph_ = false;
  bool profile_ = false;
  std::string draw_graph_;
  std::string tensorboard_;
  std::string checkpoint_;
  int keep_ = 2;
  bool resume_ = false;
  std::optional<std::string> dtype_;
  std::optional<std::int64_t> steps_, batch_, context_, layers_, heads_, width_, warmup_, eval_every_, sample_,
      accumulate_, checkpoint_every_;
  std::optional<double> dropout_, lr_, min_lr_, weight_decay_, clip_;
};

GivenOptions::GivenOptions()
    : command_line(
          "Trains a transformer on the characters of a text, or on a file of GPT-2 tokens, and generates a sample.",
          "train_transformer") {
  std::vector<std::string> names;
  for (const auto& [name, recipe] : recipes) {
    names.push_back(name);
  }
  command_line.add_option("--preset", preset_, fmt::format("Initial settings: {}", fmt::join(names, ", ")))
      .one_of(names);
  command_line.add_option(
      "--data", data_,
      "Training data: a UTF-8 text, tokenized by character, or a .bin file of GPT-2 tokens in the format of "
      "nanoGPT or llm.c; the last tenth is used for validation (default: mica's sources and documents)");
  command_line
      .add_option(
          "--documents", documents_,
          "Where the token <|endoftext|> separates documents, at their begin (llm.c) or end (nanoGPT): attention and "
          "positions then stay within each document; none: ignore documents")
      .one_of({"none", "begin", "end"});
  command_line.add_option("--device", device_, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"});
  command_line
      .add_option(
          "--gpus", gpus_,
          "Train on this many GPUs of this machine: starts one rank per GPU with mpirun. For ranks on the CPU or on "
          "several machines, run mpirun -n 4 train_transformer ...")
      .between(1, 1024);
  command_line.add_option("--steps", steps_, "Training steps").at_least(1);
  command_line.add_option("--batch", batch_, "Sequences per batch, for all ranks together").at_least(1);
  command_line.add_option("--context", context_, "Tokens per sequence").at_least(1);
  command_line.add_option("--layers", layers_, "Transformer blocks").at_least(1);
  command_line.add_option("--heads", heads_, "Attention heads per block").at_least(1);
  command_line.add_option("--width", width_, "Model width; a multiple of --heads").at_least(1);
  command_line.add_option("--dropout", dropout_, "Dropout probability").between(0, 0.999);
  command_line.add_option("--lr", lr_, "Peak learning rate").positive();
  command_line.add_option("--min-lr", min_lr_, "Final learning rate").at_least(0);
  command_line.add_option("--warmup", warmup_, "Warm-up steps").at_least(0);
  command_line.add_option("--weight-decay", weight_decay_, "AdamW weight decay, applied to matrices only").at_least(0);
  command_line.add_option("--clip", clip_, "Maximum gradient norm; 0 disables clipping").at_least(0);
  command_line
      .add_option(
          "--ema", ema_,
          "Decay of exponential moving averages of the weights, such as 0.999; validation and the saved model use "
          "the averages; 0: none")
      .between(0, 0.999999)
      .show_default();
  command_line.add_option("--eval-every", eval_every_, "Steps between validations").at_least(1);
  command_line.add_option("--tensorboard", tensorboard_,
                          "Folder for a TensorBoard event file with losses, learning rate, norms and weights");
  command_line.add_option("--seed", seed_, "Random seed").between(0, 1e18).show_default();
  command_line.add_option("--threads", threads_, "CPU threads; 0 uses every core").between(0, 1024);
  command_line
      .add_option("--workers", workers_, "Threads that prepare batches; their number does not change the batches")
      .between(0, 256);
  command_line.add_flag("--zero", zero_,
                        "Shard the optimizer: each rank keeps the state for its share of the weights (ZeRO-1)");
  command_line.add_flag("--reduce-float32", reduce_float32_,
                        "Sum the ranks' 16-bit gradients in float32, which transfers twice the bytes");
  command_line.add_flag(
      "--check-gradients", check_gradients_,
      "With several ranks, stop at the first gradient that is not finite and name its rank, before the mean "
      "spreads it to all ranks; slower on a GPU");
  command_line.add_flag("--recompute", recompute_,
                        "Recompute the activations of each block in backward: less memory, more time, the same losses");
  command_line.add_flag("--tf32", tf32_,
                        "Use TF32 for float32 matrix products on a GPU: faster, with 10 instead of 23 mantissa bits");
  command_line
      .add_option(
          "--dtype", dtype_,
          "Dtype of weights and activations: float32, float16, bfloat16 or auto. auto is bfloat16 if the device "
          "has instructions for it (GPUs, CPUs with AMX), else float32. With 16 bits the optimizer keeps "
          "float32 master weights")
      .one_of({"auto", "float32", "float16", "bfloat16"});
  command_line.add_option("--accumulate", accumulate_, "Batches per step, whose gradients are accumulated").at_least(1);
  command_line.add_flag("--no-cuda-graph", no_cuda_graph_,
                        "Launch every kernel from the CPU instead of replaying a captured CUDA graph");
  command_line.add_flag(
      "--profile", profile_,
      "Profile ten steps: print a table of time and memory, and write trace.json for ui.perfetto.dev");
  command_line.add_option("--draw-graph", draw_graph_,
                          "Draw the autograd graph of the first step to a .dot file, or with Graphviz to a .svg file");
  command_line.add_option("--out", out_, "Output folder for the model, the metrics and the loss curve").show_default();
  command_line.add_option(
      "--checkpoint", checkpoint_,
      "Folder for checkpoints; a run resumed from one is bit-identical to a run that was never stopped "
      "(default: none)");
  command_line.add_option("--checkpoint-every", checkpoint_every_, "Steps between checkpoints (default: --eval-every)")
      .at_least(1);
  command_line.add_option("--keep", keep_, "Number of newest checkpoints to keep").between(1, 1e6).show_default();
  command_line.add_flag(
      "--resume", resume_,
      "Continue from the newest complete checkpoint, with the same settings except --steps and --eval-every; without a "
      "checkpoint, start a new run");
  std::string footer = "Presets:\n";
  for (const auto& [name, r] : recipes) {
    footer += fmt::format(
        "  {}: {} steps of {} x {} sequences of {} tokens; {} layers, {} heads, width {}, dropout {};\n"
        "    lr {:g} to {:g}, warm-up {}, weight decay {}, clip {}, validation every {}, sample {}, dtype {}\n",
        name, r.steps, r.accumulate, r.batch, r.context, r.layers, r.heads, r.width, r.dropout, r.lr, r.min_lr,
        r.warmup, r.weight_decay, r.clip, r.eval_every, r.sample, r.dtype);
  }
  command_line.footer(footer);
  command_line.add_option("--sample", sample_, "Characters to generate after training; 0 for none").at_least(0);
}

Options GivenOptions::options() const {
  Options options;
  static_cast<Recipe&>(options) = recipes.at(preset_);
  options.preset = preset_;
  options.data = data_;
  options.documents = documents_;
  options.device = device_;
  options.gpus = gpus_;
  options.out = out_;
  options.seed = seed_;
  options.threads = threads_;
  options.workers = workers_;
  options.ema = ema_;
  options.recompute = recompute_;
  options.zero = zero_;
  options.reduce_float32 = reduce_float32_;
  options.check_gradients = check_gradients_;
  options.tf32 = tf32_;
  options.cuda_graph = !no_cuda_graph_;
  options.profile = profile_;
  options.draw_graph = draw_graph_;
  options.tensorboard = tensorboard_;
  options.checkpoint = checkpoint_;
  options.keep = keep_;
  options.resume = resume_;
  if (documents_ != "none" && !trains_on_tokens(options)) {
    throw UsageError("--documents: expected a .bin file of tokens as --data");
  }
  if (trains_on_tokens(options)) {
    if (sample_.value_or(0) > 0) {
      throw UsageError(fmt::format("--sample: {} contains tokens, which this program cannot decode to text", data_));
    }
    options.sample = 0;
  }
  // Short runs scale down the recipe's warm-up and validation interval.
  options.steps = steps_.value_or(options.steps);
  options.warmup = warmup_.value_or(std::min(options.warmup, options.steps / 10));
  options.warmup_given = warmup_.has_value();
  options.eval_every = eval_every_.value_or(std::min(options.eval_every, options.steps));
  options.checkpoint_every = checkpoint_every_.value_or(options.eval_every);
  options.batch = batch_.value_or(options.batch);
  options.accumulate = accumulate_.value_or(options.accumulate);
  options.context = context_.value_or(options.context);
  options.layers = layers_.value_or(options.layers);
  options.heads = heads_.value_or(options.heads);
  options.width = width_.value_or(options.width);
  options.sample = sample_.value_or(options.sample);
  options.dropout = dropout_.value_or(options.dropout);
  options.lr = lr_.value_or(options.lr);
  options.min_lr = min_lr_.value_or(std::min(options.min_lr, options.lr));
  options.weight_decay = weight_decay_.value_or(options.weight_decay);
  options.clip = clip_.value_or(options.clip);
  options.dtype = dtype_.value_or(options.dtype);

  if (options.width % options.heads != 0) {
    throw UsageError(fmt::format("--width: expected a multiple of the {} heads, got {}", options.heads, options.width));
  }
  if (options.min_lr > options.lr) {
    throw UsageError(fmt::format("--min-lr: expected at most --lr, which is {}, got {}", options.lr, options.min_lr));
  }
  if (options.warmup > options.steps) {
    throw UsageError(
        fmt::format("--warmup: expected at most --steps, which is {}, got {}", options.steps, options.warmup));
  }
  for (const char* name : {"--checkpoint-every", "--keep", "--resume"}) {
    if (options.checkpoint.empty() && command_line.given(name)) {
      throw UsageError(fmt::format("{}: expected --checkpoint FOLDER with it", name));
    }
  }
  if (options.gpus > 0 && options.device == "cpu") {
    throw UsageError("--gpus: expected another --device than cpu");
  }
  if (const int ranks = mica::dist::world().size(); options.batch % ranks != 0) {
    throw UsageError(fmt::format("--batch: expected a multiple of the {} ranks, got {}", ranks, options.batch));
  }
  if (options.check_gradients && options.dtype == "float16") {
    throw UsageError("--check-gradients: expected another --dtype than float16, whose loss scale infinities adapt");
  }
  if (options.out.empty()) {
    throw UsageError("--out: expected a folder, got nothing");
  }
  return options;
}

}  // namespace

bool trains_on_tokens(const Options& options) { return options.data.ends_with(".bin"); }

int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body) {
  GivenOptions given;
  return given.command_line.run(argc, argv, [&] {
    const Options options = given.options();
    if (options.gpus > 0) {
      start_ranks_on_gpus(options.gpus, argv);
    }
    body(options);
  });
}
