// Writes text with a model that train_transformer made.

#include <filesystem>
#include <string>

#include "examples/common/character_model.h"
#include "examples/common/command_line.h"
#include <mica/core/parallel.h>

int main(int argc, char** argv) {
  CLI::App app("Writes text with a model that train_transformer made.", "generate");
  std::string folder, prompt, device = "auto";
  std::int64_t tokens = 500;
  mica::nn::SamplingOptions sampling{.temperature = 0.8};
  int threads = 0;
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--model", folder, "Folder that train_transformer wrote")->required();
  app.add_option("--prompt", prompt, "Text to continue; without it, a new line");
  app.add_option("--tokens", tokens, "Characters to write")->check(at_least(0))->capture_default_str();
  app.add_option("--temperature", sampling.temperature, "0 takes the most likely character, 1 draws as the model says")
      ->check(at_least(0))
      ->capture_default_str();
  app.add_option("--top-k", sampling.top_k, "Draw among the k most likely characters; 0: among all")
      ->check(at_least(0))
      ->capture_default_str();
  app.add_option("--seed", sampling.seed, "Seed of the draws")->check(between(0, 1e18))->capture_default_str();
  app.add_option("--device", device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", threads, "CPU threads; 0 for as many as there are cores")->check(between(0, 1024));

  return run_program(app, argc, argv, [&] {
    if (threads > 0) {
      mica::set_num_threads(threads);
    }
    CharacterModel model =
        load_character_model(std::filesystem::path(folder) / "model.safetensors", device_named(device));
    model.tokenizer.encode(prompt);  // so that a bad prompt is an error before anything is written
    put(prompt);
    write_text(model, prompt, tokens, sampling, put);
    put("\n");
  });
}
