// Generates text with a model trained by train_transformer.

#include <filesystem>
#include <string>

#include "examples/common/character_model.h"
#include "examples/common/command_line.h"
#include <mica/core/parallel.h>

int main(int argc, char** argv) {
  CommandLine command_line("Generates text with a model trained by train_transformer.", "generate");
  std::string folder, prompt, device = "auto";
  std::int64_t tokens = 500;
  mica::nn::SamplingOptions sampling{.temperature = 0.8};
  int threads = 0;
  command_line.add_option("--model", folder, "Output folder of train_transformer").required();
  command_line.add_option("--prompt", prompt, "Text to continue (default: a newline)");
  command_line.add_option("--tokens", tokens, "Characters to generate").at_least(0).show_default();
  command_line
      .add_option("--temperature", sampling.temperature,
                  "0 always picks the most likely character; 1 samples the model's distribution")
      .at_least(0)
      .show_default();
  command_line.add_option("--top-k", sampling.top_k, "Sample from the k most likely characters only; 0 for all")
      .at_least(0)
      .show_default();
  command_line.add_option("--seed", sampling.seed, "Random seed").between(0, 1e18).show_default();
  command_line.add_option("--device", device, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--threads", threads, "CPU threads; 0 uses every core").between(0, 1024);

  return command_line.run(argc, argv, [&] {
    if (threads > 0) {
      mica::set_num_threads(threads);
    }
    CharacterModel model =
        load_character_model(std::filesystem::path(folder) / "model.safetensors", device_named(device));
    model.tokenizer.encode(prompt);  // reports a bad prompt before anything is written
    put(prompt);
    write_text(model, prompt, tokens, sampling, put);
    put("\n");
  });
}
