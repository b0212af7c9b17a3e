#include "examples/finetune/options.h"

#include <fmt/core.h>

#include <sstream>

#include "examples/common/command_line.h"

namespace {

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    if (part.empty()) {
      throw UsageError("--target: expected comma-separated patterns, got " + text);
    }
    parts.push_back(part);
  }
  return parts;
}

}  // namespace

int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body) {
  CommandLine line(
      "Fine-tunes a Hugging Face language model on a text or on examples: trains low-rank adapters of its linear "
      "layers "
      "(LoRA), optionally on quantized weights (QLoRA), and saves them in PEFT's format.",
      "finetune");
  Options o;
  std::string targets;
  line.add_option("--model", o.model, "Folder with config.json, safetensors and the tokenizer's files, or a .gguf file")
      .required();
  line.add_option(
          "--data", o.data,
          "A text file, or a .jsonl file with an example on each line: {\"text\": …}, {\"prompt\": …, \"completion\": "
          "…}, "
          "which trains the completion, or {\"messages\": [{\"role\": …, \"content\": …}, …]}, which trains the "
          "last message")
      .required();
  line.add_option("--out", o.out, "Folder for the adapter").show_default();
  line.add_option("--rank", o.lora.rank, "Rank of the adapters").between(1, 1 << 14).show_default();
  line.add_option("--alpha", o.lora.alpha, "The adapters' output is scaled by alpha / rank").positive().show_default();
  line.add_option("--dropout", o.lora.dropout, "Dropout of the adapters' input").between(0, 0.999).show_default();
  line.add_option(
      "--target", targets,
      "Comma-separated patterns of layer names, such as \"*q_proj,*v_proj\" (default: all linear layers but "
      "the head)");
  line.add_option("--quantize", o.bits, "Bits of the frozen weights: 8 or 4 (default: not quantized)").between(4, 8);
  line.add_option("--epochs", o.epochs, "Passes over the data").positive().show_default();
  line.add_option("--steps", o.steps, "Training steps, instead of --epochs").at_least(1);
  line.add_option("--batch", o.batch, "Examples per batch").between(1, 1 << 16).show_default();
  line.add_option("--accumulate", o.accumulate, "Batches per step, whose gradients are accumulated")
      .between(1, 1 << 16)
      .show_default();
  line.add_option(
          "--context", o.context,
          "Maximum number of tokens per sequence; longer texts are split (default: 1024, or the model's maximum if "
          "that is smaller)")
      .at_least(2);
  line.add_flag("--skip-long", o.skip_long,
                "Skip examples that are longer than the context, instead of stopping with an error");
  line.add_option("--lr", o.lr, "Peak learning rate").positive().show_default();
  line.add_option("--schedule", o.schedule, "Learning rate after the warm-up: cosine, linear or constant")
      .one_of({"cosine", "linear", "constant"})
      .show_default();
  line.add_option("--warmup", o.warmup, "Warm-up steps (default: 3 % of the steps)").at_least(0);
  line.add_option("--weight-decay", o.weight_decay, "AdamW weight decay").at_least(0).show_default();
  line.add_option("--clip", o.clip, "Maximum gradient norm; 0 disables clipping").at_least(0).show_default();
  line.add_option("--validation", o.validation, "Fraction of the examples used for validation")
      .between(0, 0.9)
      .show_default();
  line.add_option("--eval-every", o.eval_every, "Steps between validations (default: a tenth of the steps)")
      .at_least(1);
  line.add_option("--dtype", o.dtype, "float32, bfloat16, or auto: bfloat16 if the device is fast with it")
      .one_of({"auto", "float32", "bfloat16"})
      .show_default();
  line.add_option("--device", o.device, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"}).show_default();
  line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  line.add_option("--seed", o.seed, "Random seed").between(0, 1e18).show_default();
  line.add_flag("--recompute", o.recompute, "Recompute the activations of each block in backward, to save memory");
  line.add_flag("--pack", o.pack, "Pack short examples into shared rows: the same losses in less time");
  line.add_option("--checkpoint", o.checkpoint.folder,
                  "Folder for checkpoints; a run resumed from one is bit-identical to a run that was never stopped "
                  "(default: none)");
  line.add_option("--checkpoint-every", o.checkpoint_every, "Steps between checkpoints (default: --eval-every)")
      .at_least(1);
  line.add_option("--keep", o.checkpoint.keep, "Number of newest checkpoints to keep").between(1, 1e6).show_default();
  line.add_flag(
      "--resume", o.checkpoint.resume,
      "Continue from the newest complete checkpoint, with the same settings; without a checkpoint, start a new run");
  line.add_option("--tensorboard", o.tensorboard,
                  "Folder for a TensorBoard event file with losses, learning rates and norms");
  return line.run(argc, argv, [&] {
    if (o.bits && *o.bits != 8 && *o.bits != 4) {
      throw UsageError(fmt::format("--quantize: expected 8 or 4, got {}", *o.bits));
    }
    if (o.out.empty()) {
      throw UsageError("--out: expected a folder, got nothing");
    }
    for (const char* name : {"--checkpoint-every", "--keep", "--resume"}) {
      if (o.checkpoint.folder.empty() && line.given(name)) {
        throw UsageError(fmt::format("{}: expected --checkpoint FOLDER with it", name));
      }
    }
    o.targets = split_at_commas(targets);
    body(o);
  });
}
