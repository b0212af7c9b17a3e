#include "examples/train_transformer/options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <vector>

#include "examples/common/command_line.h"
#include "examples/common/ranks.h"
#include <mica/distributed/group.h>

namespace {

mica::train::TrainerOptions training(std::int64_t steps, std::int64_t accumulate = 1) {
  return {.steps = steps,
          .step = {.accumulate = accumulate, .clip = 1},
          .unit = "tokens",
          .names = {.program = "train_transformer", .prefix = "--"}};
}

// GPT-2's sizes with half a million tokens per step, for ten billion tokens. Learning rates from GPT-3's paper (Brown
// et al., 2020, table 2.1), other settings from nanoGPT and llm.c.
Options gpt2(std::string_view size, std::int64_t batch, double lr) {
  const mica::nn::GPTConfig model = mica::nn::gpt2_config(size);
  const mica::optim::CosineSchedule schedule{.peak = lr, .floor = lr / 10, .warmup = 700};
  Options o{model, training(19000, (1 << 19) / (batch * model.context)), schedule, batch, 0};
  o.adamw.betas[1] = 0.95;
  return o;
}

Options characters(mica::nn::GPTConfig model, std::int64_t steps, double lr, std::int64_t batch, std::int64_t sample) {
  model.bias = false;
  return {model, training(steps), {.peak = lr, .floor = 1e-4, .warmup = 100}, batch, sample};
}

const mica::nn::GPTConfig small{.context = 128, .layers = 4, .heads = 4, .width = 128};
const mica::nn::GPTConfig smaller{.context = 64, .layers = 4, .heads = 4, .width = 128};
const mica::nn::GPTConfig larger{.context = 256, .layers = 6, .heads = 6, .width = 384, .dropout = 0.2};
const std::map<std::string, Options> presets{
    {"default", characters(small, 2000, 2e-3, 16, 600)},  // for the built-in text: at most two minutes on two cores
    {"gpt2-124m", gpt2("124m", 32, 6e-4)},
    {"gpt2-350m", gpt2("350m", 16, 3e-4)},
    {"gpt2-774m", gpt2("774m", 16, 2.5e-4)},
    {"gpt2-1558m", gpt2("1558m", 16, 2e-4)},
    {"shakespeare-cpu", characters(smaller, 2000, 1e-3, 12, 500)},  // nanoGPT's two recipes
    {"shakespeare-gpu", characters(larger, 5000, 1e-3, 64, 500)},
};

// The preset named on the command line, for the options that are not given. An unknown name is reported later.
Options preset_of(int argc, char** argv) {
  std::string name = "default";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--preset" && i + 1 < argc) {
      name = argv[i + 1];
    } else if (word.starts_with("--preset=")) {
      name = word.substr(word.find('=') + 1);
    }
  }
  return presets.contains(name) ? presets.at(name) : presets.at("default");
}

void add_options(CommandLine& line, Options& o) {
  mica::train::TrainerOptions& train = o.train;
  std::vector<std::string> names;
  std::string footer = "Presets:\n";
  for (const auto& [name, p] : presets) {
    names.push_back(name);
    footer += fmt::format(
        "  {}: {} steps of {} x {} sequences of {} tokens; {} layers, {} heads, width {}, dropout {};\n"
        "    lr {:g} to {:g}, warm-up {}, weight decay {}, clip {}, validation every {}, sample {}, dtype {}\n",
        name, p.train.steps, p.train.step.accumulate, p.batch, p.model.context, p.model.layers, p.model.heads,
        p.model.width, p.model.dropout, p.schedule.peak, p.schedule.floor, p.schedule.warmup, p.adamw.weight_decay,
        p.train.step.clip, p.train.eval_every, p.sample, p.dtype);
  }
  line.footer(footer);
  line.add_option("--preset", o.preset, fmt::format("Initial settings: {}", fmt::join(names, ", "))).one_of(names);
  line.add_option(
      "--data", o.data,
      "Training data: a UTF-8 text, tokenized by character, or a .bin file of GPT-2 tokens in the format of "
      "nanoGPT or llm.c; the last tenth is used for validation (default: mica's sources and documents)");
  line.add_option("--documents", o.documents,
                  "Where the token <|endoftext|> separates documents, at their begin (llm.c) or end (nanoGPT): "
                  "attention and positions then stay within each document; none: ignore documents")
      .one_of({"none", "begin", "end"});
  line.add_option("--device", o.device, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"});
  line.add_option(
          "--gpus", o.gpus,
          "Train on this many GPUs of this machine: starts one rank per GPU. For ranks on the CPU or on several "
          "machines, run mpirun -n 4 train_transformer ...")
      .between(1, 1024);
  line.add_option("--steps", train.steps, "Training steps").at_least(1);
  line.add_option("--batch", o.batch, "Sequences per batch, for all ranks together").at_least(1);
  line.add_option("--context", o.model.context, "Tokens per sequence").at_least(1);
  line.add_option("--layers", o.model.layers, "Transformer blocks").at_least(1);
  line.add_option("--heads", o.model.heads, "Attention heads per block").at_least(1);
  line.add_option("--width", o.model.width, "Model width; a multiple of --heads").at_least(1);
  line.add_option("--dropout", o.model.dropout, "Dropout probability").between(0, 0.999);
  line.add_option("--lr", o.schedule.peak, "Peak learning rate").positive();
  line.add_option("--min-lr", o.schedule.floor, "Final learning rate").at_least(0);
  line.add_option("--warmup", o.schedule.warmup, "Warm-up steps").at_least(0);
  line.add_option("--weight-decay", o.adamw.weight_decay, "AdamW weight decay, applied to matrices only").at_least(0);
  line.add_option("--clip", train.step.clip, "Maximum gradient norm; 0 disables clipping").at_least(0);
  line.add_option("--ema", train.step.ema,
                  "Decay of exponential moving averages of the weights, such as 0.999; validation and the saved model "
                  "use the averages; 0: none")
      .between(0, 0.999999)
      .show_default();
  line.add_option("--eval-every", train.eval_every, "Steps between validations").at_least(1);
  line.add_option("--tensorboard", train.tensorboard,
                  "Folder for a TensorBoard event file with losses, learning rate, norms and weights");
  line.add_option("--seed", o.seed, "Random seed").between(0, 1e18).show_default();
  line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  line.add_option("--workers", o.workers, "Threads that prepare batches; their number does not change the batches")
      .between(0, 256);
  line.add_flag("--zero", o.zero,
                "Shard the optimizer: each rank keeps the state for its share of the weights (ZeRO-1)");
  line.add_flag("--reduce-float32", o.reduce_float32,
                "Sum the ranks' 16-bit gradients in float32, which transfers twice the bytes");
  line.add_flag("--check-gradients", train.step.parallel.check_gradients,
                "With several ranks, stop at the first gradient that is not finite and name its rank, before the mean "
                "spreads it to all ranks; slower on a GPU");
  line.add_flag("--recompute", o.model.checkpoint,
                "Recompute the activations of each block in backward: less memory, more time, the same losses");
  line.add_flag("--tf32", o.tf32,
                "Use TF32 for float32 matrix products on a GPU: faster, with 10 instead of 23 mantissa bits");
  line.add_option(
          "--dtype", o.dtype,
          "Dtype of weights and activations: float32, float16, bfloat16 or auto. auto is bfloat16 if the "
          "device has instructions for it (GPUs, CPUs with AMX), else float32. With 16 bits the optimizer keeps "
          "float32 master weights")
      .one_of({"auto", "float32", "float16", "bfloat16"});
  line.add_option("--accumulate", train.step.accumulate, "Batches per step, whose gradients are accumulated")
      .at_least(1);
  line.add_flag("--no-cuda-graph", o.no_cuda_graph,
                "Launch every kernel from the CPU instead of replaying a captured CUDA graph");
  line.add_flag("--profile", train.profile,
                "Profile ten steps: print a table of time and memory, and write trace.json for ui.perfetto.dev");
  line.add_option("--draw-graph", train.step.draw_graph,
                  "Draw the autograd graph of the first step to a .dot file, or with Graphviz to a .svg file");
  line.add_option("--out", train.out, "Output folder for the model, the metrics and the loss curve").show_default();
  line.add_option("--checkpoint", train.checkpoint.folder,
                  "Folder for checkpoints; a run resumed from one is bit-identical to a run that was never stopped "
                  "(default: none)");
  line.add_option("--checkpoint-every", train.checkpoint.every, "Steps between checkpoints (default: --eval-every)")
      .at_least(1);
  line.add_option("--keep", train.checkpoint.keep, "Number of newest checkpoints to keep")
      .between(1, 1e6)
      .show_default();
  line.add_flag("--resume", train.checkpoint.resume,
                "Continue from the newest complete checkpoint, with the same settings except --steps and --eval-every; "
                "without a checkpoint, start a new run");
  line.add_option("--sample", o.sample, "Characters to generate after training; 0 for none").at_least(0);
}

// Derives what was not given from what was, and throws UsageError if options do not fit together.
void complete(Options& o, const CommandLine& line) {
  const auto require = [](bool good, const char* name, const std::string& problem) {
    if (!good) {
      throw UsageError(fmt::format("--{}: {}", name, problem));
    }
  };
  require(o.documents == "none" || o.has_tokens(), "documents", "expected a .bin file of tokens as --data");
  require(!o.has_tokens() || !line.given("--sample") || o.sample == 0, "sample",
          fmt::format("{} contains tokens, which this program cannot decode to text", o.data));
  o.sample = o.has_tokens() ? 0 : o.sample;
  // Short runs scale down the preset's warm-up and validation interval.
  if (!line.given("--warmup")) {
    o.schedule.warmup = std::min(o.schedule.warmup, o.train.steps / 10);
    o.train.kept_settings = {"warmup"};  // a resumed run of more steps keeps its warm-up
  }
  o.train.eval_every = line.given("--eval-every") ? o.train.eval_every : std::min(o.train.eval_every, o.train.steps);
  o.schedule.floor = line.given("--min-lr") ? o.schedule.floor : std::min(o.schedule.floor, o.schedule.peak);
  require(o.model.width % o.model.heads == 0, "width",
          fmt::format("expected a multiple of the {} heads, got {}", o.model.heads, o.model.width));
  require(o.schedule.floor <= o.schedule.peak, "min-lr",
          fmt::format("expected at most --lr, which is {}, got {}", o.schedule.peak, o.schedule.floor));
  require(o.schedule.warmup <= o.train.steps, "warmup",
          fmt::format("expected at most --steps, which is {}, got {}", o.train.steps, o.schedule.warmup));
  for (const char* name : {"checkpoint-every", "keep", "resume"}) {
    require(!o.train.checkpoint.folder.empty() || !line.given(std::string("--") + name), name,
            "expected --checkpoint FOLDER with it");
  }
  require(o.gpus == 0 || o.device != "cpu", "gpus", "expected another --device than cpu");
  const int ranks = mica::distributed::world().size();
  require(o.batch % ranks == 0, "batch", fmt::format("expected a multiple of the {} ranks, got {}", ranks, o.batch));
  require(!o.train.step.parallel.check_gradients || o.dtype != "float16", "check-gradients",
          "expected another --dtype than float16, whose loss scale infinities adapt");
  require(!o.train.out.empty(), "out", "expected a folder, got nothing");
  o.schedule.total = o.train.steps;
  o.train.step.cuda_graph = !o.no_cuda_graph;
  o.train.settings = line.values({"batch", "context", "layers", "heads", "width", "dropout", "lr", "min-lr", "warmup",
                                  "weight-decay", "seed", "tf32", "documents"});
  o.train.settings["bias"] = fmt::format("{}", o.model.bias);
  o.train.settings["beta2"] = fmt::format("{}", o.adamw.betas[1]);
  if (o.reduce_float32) {
    o.train.step.parallel.reduce_dtype = mica::float32;
    o.train.settings["reduce-float32"] = "true";
  }
}

}  // namespace

int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body) {
  CommandLine line(
      "Trains a transformer on the characters of a text, or on a file of GPT-2 tokens, and generates a sample.",
      "train_transformer");
  Options options = preset_of(argc, argv);
  add_options(line, options);
  return line.run(argc, argv, [&] {
    complete(options, line);
    if (options.gpus > 0) {
      start_ranks_on_gpus(options.gpus, argv);
    }
    body(options);
  });
}
