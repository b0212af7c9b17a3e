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
      throw UsageError("--target: expected patterns with commas between them, got " + text);
    }
    parts.push_back(part);
  }
  return parts;
}

}  // namespace

int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body) {
  CommandLine line(
      "Fine-tunes a language model of Hugging Face on a text or on examples: trains low-rank adapters of its linear "
      "layers (LoRA), on quantized weights if asked to (QLoRA), and writes them as PEFT does.",
      "finetune");
  Options o;
  std::string targets;
  line.add_option("--model", o.model, "Folder with config.json, safetensors and the tokenizer's files, or a .gguf file")
      .required();
  line.add_option(
          "--data", o.data,
          "A text, or examples in a .jsonl file: on each line {\"text\": …}, or {\"prompt\": …, \"completion\": "
          "…}, of which the completion is learned, or {\"messages\": [{\"role\": …, \"content\": …}, …]}, of "
          "which the last message is learned")
      .required();
  line.add_option("--out", o.out, "Folder for the adapter").show_default();
  line.add_option("--rank", o.lora.rank, "Rank of the adapters").between(1, 1 << 14).show_default();
  line.add_option("--alpha", o.lora.alpha, "Their product is scaled by alpha / rank").positive().show_default();
  line.add_option("--dropout", o.lora.dropout, "Dropout of the adapters' input").between(0, 0.999).show_default();
  line.add_option("--target", targets,
                  "Patterns of the layers' names with commas between them, such as \"*q_proj,*v_proj\" (default: all "
                  "linear layers but the head)");
  line.add_option("--quantize", o.bits, "Bits of the frozen weights: 8 or 4 (default: not quantized)").between(4, 8);
  line.add_option("--epochs", o.epochs, "Passes over the data").positive().show_default();
  line.add_option("--steps", o.steps, "Training steps, instead of --epochs").at_least(1);
  line.add_option("--batch", o.batch, "Examples per batch").between(1, 1 << 16).show_default();
  line.add_option("--accumulate", o.accumulate, "Batches per step, whose gradients are accumulated")
      .between(1, 1 << 16)
      .show_default();
  line.add_option("--context", o.context,
                  "Tokens per sequence, at most: longer texts are cut into several (default: 1024, or the model's "
                  "positions if it has fewer)")
      .at_least(2);
  line.add_flag("--skip-long", o.skip_long, "Leave out examples longer than the context, instead of stopping");
  line.add_option("--lr", o.lr, "Peak learning rate").positive().show_default();
  line.add_option("--schedule", o.schedule, "cosine, linear or constant, after the warm-up")
      .one_of({"cosine", "linear", "constant"})
      .show_default();
  line.add_option("--warmup", o.warmup, "Warm-up steps (default: 3 % of the steps)").at_least(0);
  line.add_option("--weight-decay", o.weight_decay, "AdamW weight decay").at_least(0).show_default();
  line.add_option("--clip", o.clip, "Maximum gradient norm; 0 disables clipping").at_least(0).show_default();
  line.add_option("--validation", o.validation, "Part of the examples that is kept for validation")
      .between(0, 0.9)
      .show_default();
  line.add_option("--eval-every", o.eval_every, "Steps between validations (default: a tenth of the steps)")
      .at_least(1);
  line.add_option("--dtype", o.dtype, "float32, bfloat16, or auto: bfloat16 where it is fast")
      .one_of({"auto", "float32", "bfloat16"})
      .show_default();
  line.add_option("--device", o.device, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"}).show_default();
  line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  line.add_option("--seed", o.seed, "Random seed").between(0, 1e18).show_default();
  line.add_flag("--recompute", o.recompute, "Recompute the activations of each block in backward, to save memory");
  line.add_flag("--pack", o.pack, "Let short examples share rows: the same losses in less time");
  line.add_option("--checkpoint", o.checkpoint.folder,
                  "Folder for checkpoints, from which --resume goes on with the same bits as a run that was never "
                  "stopped (default: none)");
  line.add_option("--checkpoint-every", o.checkpoint_every, "Steps between checkpoints (default: --eval-every)")
      .at_least(1);
  line.add_option("--keep", o.checkpoint.keep, "Checkpoints to keep, the newest ones").between(1, 1e6).show_default();
  line.add_flag("--resume", o.checkpoint.resume,
                "Go on from the newest complete checkpoint, with the same settings; without one, begin");
  line.add_option("--tensorboard", o.tensorboard, "Folder for an event file of TensorBoard: losses, rates and norms");
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
