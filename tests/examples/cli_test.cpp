// Runs the example programs from the command line, with valid and invalid input.

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <tests/examples/programs.h>
#include <tests/folders.h>
#include <tests/paths.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/io/chat.h>
#include <mica/io/gguf.h>
#include <mica/io/pretrained.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/optim/schedule.h>

namespace fs = std::filesystem;

using mica::testing_support::contents;
using mica::testing_support::Outcome;

namespace {

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(programs / "train_transformer")) {
      GTEST_SKIP() << "the example programs are not at " << programs;
    }
    std::string text;
    for (int i = 0; i < 100; ++i) {
      text += "the quick brown fox → jumps over the lazy dog\n";
    }
    write("text.txt", text);
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder / name, std::ios::binary) << text;
  }

  /// Runs build/bin/<command>; relative paths are below the test's folder.
  Outcome run(const std::string& command) const {
    return mica::testing_support::run_program(folder, programs, command);
  }

  /// Runs train_transformer with a model so small that it takes at most a second.
  Outcome train(const std::string& more) const {
    return run(
        "train_transformer --data text.txt --device cpu --dtype float32 --steps 12 --batch 4 --context 16 --layers 1 "
        "--heads 2 "
        "--width 16 --eval-every 5 --threads 1 --sample 20 " +
        more);
  }

  std::vector<nlohmann::json> metrics(const std::string& out) const {
    std::vector<nlohmann::json> lines;
    std::istringstream text(contents(folder / out / "metrics.jsonl"));
    for (std::string line; std::getline(text, line);) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }

  /// Expects the exit status, one line on stderr that contains `text`, and that nothing was written to run/.
  void expect_refusal(const std::string& command, int status, const std::string& text) const {
    mica::testing_support::expect_refused(run(command), command, status, text);
    EXPECT_FALSE(fs::exists(folder / "run")) << command;
  }

  const mica::testing_support::TemporaryFolder own;
  const fs::path folder = own.path();
  const fs::path programs = mica::testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS);
};

TEST_F(Cli, TrainsWritesAndGenerates) {
  const Outcome trained = train("--out run --tensorboard events");
  ASSERT_EQ(trained.status, 0) << trained.err;
  EXPECT_NE(trained.out.find("step 12/12"), std::string::npos) << trained.out;
  // tests/tensorboard/check_events.py checks the whole file.
  const std::string events = contents(fs::directory_iterator(folder / "events")->path());
  for (const char* tag : {"loss/train", "loss/validation", "grad_norm", "weights/wte.weight", "1 layers, 2 heads"}) {
    EXPECT_NE(events.find(tag), std::string::npos) << tag;
  }

  const auto lines = metrics("run");
  ASSERT_EQ(lines.size(), 12u);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i].at("step"), i + 1);
    for (const char* name : {"train_loss", "lr", "grad_norm", "tokens_per_second", "step_ms", "peak_memory_bytes"}) {
      EXPECT_GT(lines[i].at(name).get<double>(), 0) << name;
    }
    const bool evaluated = i + 1 == 5 || i + 1 == 10 || i + 1 == 12;
    EXPECT_EQ(lines[i].contains("val_loss"), evaluated) << i + 1;
  }
  EXPECT_LT(lines[11].at("val_loss").get<double>(), lines[4].at("val_loss").get<double>());
  EXPECT_EQ(contents(folder / "run/loss.svg").substr(0, 4), "<svg");

  const Outcome text = run("generate --model run --prompt 'the ' --tokens 30 --seed 3 --device cpu");
  ASSERT_EQ(text.status, 0) << text.err;
  EXPECT_EQ(text.out.substr(0, 4), "the ");
  EXPECT_GE(text.out.size(), 35u);
  EXPECT_EQ(run("generate --model run --prompt 'the ' --tokens 30 --seed 3 --device cpu").out, text.out);
  EXPECT_NE(run("generate --model run --prompt 'the ' --tokens 30 --seed 4 --device cpu").out, text.out);
  EXPECT_NE(run("generate --model run --prompt 'the ' --tokens 30 --seed 3 --device cpu --window 1").out, text.out);
}

TEST_F(Cli, GeneratesWithModelsOfHuggingFace) {
  using namespace mica;
  manual_seed(3);
  nn::Llama llama({.vocab = 13, .layers = 1, .heads = 2, .key_heads = 1, .width = 8, .hidden = 8});
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape()));
  }
  io::save_pretrained(llama, folder / "llama");
  const auto printed = [](const std::vector<std::int64_t>& tokens) {
    std::string text;
    for (const std::int64_t token : tokens) {
      text += text.empty() ? "" : " ";
      text += std::to_string(token);
    }
    return text + "\n";
  };
  const infer::GenerateOptions options{.count = 20, .sampling = {.temperature = 0.8, .top_p = 0.9, .seed = 4}};
  const std::vector<std::int64_t> expected = infer::generate(llama, {{1, 5, 3}}, options)[0];
  const std::string command = "generate --model llama --device cpu --tokens 20 --top-p 0.9 --seed 4 --prompt-tokens ";
  const Outcome outcome = run(command + "1,5,3");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, printed(expected));
  EXPECT_EQ(run(command + "1,5,3 --dtype float32").out, outcome.out);
  std::vector<std::string> texts{outcome.out};
  for (const int bits : {8, 4}) {
    nn::Llama quantized = io::load_pretrained<nn::Llama>(folder / "llama");
    EXPECT_EQ(nn::quantize(quantized, bits).size(), 8u);  // the layer has 7 weights, the head 1
    const Outcome of_quantized = run(command + "1,5,3 --quantize " + std::to_string(bits));
    EXPECT_EQ(of_quantized.status, 0) << of_quantized.err;
    EXPECT_EQ(of_quantized.out, printed(infer::generate(quantized, {{1, 5, 3}}, options)[0])) << bits;
    texts.push_back(of_quantized.out);
  }
  EXPECT_NE(texts[2], texts[0]);  // 4 bits change the weights so much that the text differs
  // Generation stops at the configuration's end token, or at any of several.
  write("llama/generation_config.json",
        std::string("{\"eos_token_id\": [99, ").append(std::to_string(expected[4])).append("]}"));
  const auto stop = std::find(expected.begin(), expected.end(), expected[4]) + 1;
  EXPECT_EQ(run(command + "1,5,3").out, printed({expected.begin(), stop}));
  expect_refusal(command + "1,5,", 2, "expected integers separated by commas, got 1,5,");
  expect_refusal(command + "''", 2, "expected integers");
  expect_refusal(command + "13", 1, "expected tokens in [0, 13), got 13");
  expect_refusal("generate --model llama", 2, "takes --prompt-tokens");
  expect_refusal("generate --model llama --prompt hello", 2, "takes --prompt-tokens");
  expect_refusal("generate --model llama --prompt-tokens 1 --chat", 2, "--chat takes --prompt");
  expect_refusal("generate --model llama --prompt-tokens 1 --quantize 3", 2,
                 "--quantize: expected 8, 4, 2 or 1, got 3");
}

TEST_F(Cli, GenerateContinuesTextWithATokenizer) {
  using namespace mica;
  nn::Llama llama({.vocab = 13, .layers = 1, .heads = 2, .key_heads = 1, .width = 8, .hidden = 8});
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape()));
  }
  io::save_pretrained(llama, folder / "llama");
  // A tokenizer of letters, a line feed, and two special tokens.
  write("llama/tokenizer.json",
        R"({"model": {"type": "BPE", "merges": [], "vocab": {"u": 0, "s": 1, "e": 2, "r": 3, "a": 4,
      "i": 5, "t": 6, "n": 7, "Ċ": 8, "y": 9, "o": 10}}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
      "added_tokens": [{"id": 11, "content": "<|im_start|>", "special": true},
                       {"id": 12, "content": "<|im_end|>", "special": true}]})");
  const io::Tokenizer tokenizer = io::Tokenizer::load(folder / "llama");
  infer::GenerateOptions options{.count = 20, .sampling = {.temperature = 0.8, .seed = 4}};
  const std::string command = "generate --model llama --device cpu --tokens 20 --seed 4 --prompt ";
  EXPECT_EQ(run(command + "toy").out,
            "toy" + tokenizer.decode(infer::generate(llama, {tokenizer.encode("toy")}, options)[0]) + "\n");
  expect_refusal(command + "''", 2, "--prompt: expected some text");
  expect_refusal(command + "toy --chat", 1, "the tokenizer has no chat template");
  // If there is an error, the prompt is not printed.
  const Outcome adapter = run(command + "toy --adapter none");
  EXPECT_EQ(adapter.status, 1);
  EXPECT_EQ(adapter.out, "");

  write("llama/tokenizer_config.json", R"({"eos_token": "<|im_end|>",
      "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %})"
                                       R"({% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"})");
  const io::ChatFormat format(io::Tokenizer::load(folder / "llama"));
  const std::vector<std::int64_t> question = format.encode({{{"user", "ananas"}}});
  EXPECT_EQ(tokenizer.decode(question, {.skip_special_tokens = false}),
            "<|im_start|>user\nananas<|im_end|>\n<|im_start|>assistant\n");
  options.stop_tokens = {12};
  EXPECT_EQ(run(command + "ananas --chat").out,
            tokenizer.decode(infer::generate(llama, {question}, options)[0]) + "\n");
  expect_refusal(command + "toy --system oyster", 2, "--system takes --chat");
}

// A GGUF file has everything: the model, the tokenizer, its end tokens and the chat template.
TEST_F(Cli, GeneratesAndTunesWithAGgufFile) {
  using namespace mica;
  manual_seed(5);
  // The model's vocabulary has three tokens more than the tokenizer.
  nn::Llama llama({.vocab = 16, .context = 64, .layers = 1, .heads = 2, .key_heads = 1, .width = 8, .hidden = 8});
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape()));
  }
  const io::Tokenizer letters = io::Tokenizer::parse(
      R"({"model": {"type": "BPE", "merges": [], "vocab": {"u": 0, "s": 1, "e": 2, "r": 3, "a": 4,
      "i": 5, "t": 6, "n": 7, "Ċ": 8, "y": 9, "o": 10}}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
      "added_tokens": [{"id": 11, "content": "<|im_start|>", "special": true},
                       {"id": 12, "content": "<|im_end|>", "special": true}]})",
      R"({"eos_token": "<|im_end|>",
      "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %})"
      R"({% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"})",
      "test");
  const fs::path file = folder / "toy.gguf";
  io::save_gguf(file, llama, letters);
  const io::Tokenizer tokenizer = io::Tokenizer::load(file);
  infer::GenerateOptions options{.count = 40, .sampling = {.temperature = 0.8, .seed = 4}, .stop_tokens = {12}};
  const std::string command = "generate --model toy.gguf --device cpu --tokens 40 --seed 4 ";
  const std::vector<std::int64_t> toy = infer::generate(llama, {tokenizer.encode("toy")}, options)[0];
  ASSERT_LT(toy.size(), 40u);  // it stopped at the end token
  const Outcome outcome = run(command + "--prompt toy");
  EXPECT_EQ(outcome.out, "toy" + tokenizer.decode(toy) + "\n") << outcome.err;
  const std::vector<std::int64_t> question = io::ChatFormat(tokenizer).encode({{{"user", "ananas"}}});
  EXPECT_EQ(run(command + "--prompt ananas --chat").out,
            tokenizer.decode(infer::generate(llama, {question}, options)[0]) + "\n");
  const std::string numbers = run(command + "--prompt-tokens 6,10,9").out;
  EXPECT_EQ(std::count(numbers.begin(), numbers.end(), ' ') + 1, static_cast<std::ptrdiff_t>(toy.size())) << numbers;

  std::string text;
  for (int i = 0; i < 60; ++i) {
    text += "nuts\nsan\ntiny\n";
  }
  write("letters.txt", text);
  const Outcome tuned = run(
      "finetune --model toy.gguf --data letters.txt --out adapter --device cpu --dtype float32 --threads 1 --steps 3 "
      "--batch 4 --rank 2 --context 16 --lr 0.01");
  EXPECT_EQ(tuned.status, 0) << tuned.err;
  const Outcome adapted = run(command + "--adapter adapter --prompt toy");
  EXPECT_EQ(adapted.status, 0) << adapted.err;
  EXPECT_EQ(adapted.out.substr(0, 3), "toy");

  // If the tokenizer is not supported, prompts and results are numbers of tokens.
  io::GgufMetadata metadata = io::load_gguf_metadata(file);
  metadata["tokenizer.ggml.model"] = std::string("bert");
  io::save_gguf(file, io::load_gguf(file), metadata);
  expect_refusal(command + "--prompt toy", 1, "the tokenizer is of the model \"bert\", WordPiece");
  EXPECT_EQ(run(command + "--prompt-tokens 6,10,9").out, numbers);
  // If the file has no tokenizer, the files beside it are used.
  io::save_gguf(file, llama);
  expect_refusal(command + "--prompt toy", 2, "toy.gguf has no tokenizer: a model without one takes --prompt-tokens");
  expect_refusal("finetune --model toy.gguf --data letters.txt --out run", 1, "toy.gguf: it has no tokenizer");
  write("tokenizer.json", R"({"model": {"type": "BPE", "merges": [], "vocab": {"t": 6, "y": 9, "o": 10}},
      "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}})");
  EXPECT_EQ(run("generate --model toy.gguf --device cpu --tokens 0 --prompt toy").out, "toy\n");
  expect_refusal("generate --model none.gguf --prompt toy", 1, "none.gguf");
}

TEST_F(Cli, SameSeedSameMetrics) {
  ASSERT_EQ(train("--dropout 0.1 --seed 5 --out a").status, 0);
  ASSERT_EQ(train("--dropout 0.1 --seed 5 --out b").status, 0);
  ASSERT_EQ(train("--dropout 0.1 --seed 6 --out c").status, 0);
  auto a = metrics("a");
  auto b = metrics("b");
  auto c = metrics("c");
  ASSERT_EQ(a.size(), b.size());
  for (auto* lines : {&a, &b, &c}) {
    for (auto& line : *lines) {
      line.erase("tokens_per_second");
      line.erase("step_ms");
      line.erase("peak_memory_bytes");  // depends on how many batches were prepared ahead
    }
  }
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  EXPECT_EQ(contents(folder / "a/model.safetensors"), contents(folder / "b/model.safetensors"));
}

TEST_F(Cli, CheckpointsChangeNothing) {
  ASSERT_EQ(train("--dropout 0.1 --layers 2 --out kept").status, 0);
  ASSERT_EQ(train("--dropout 0.1 --layers 2 --out again --recompute").status, 0);
  const auto kept = metrics("kept");
  const auto again = metrics("again");
  ASSERT_EQ(kept.size(), again.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    EXPECT_EQ(kept[i].at("train_loss"), again[i].at("train_loss")) << i;
    EXPECT_EQ(kept[i].at("grad_norm"), again[i].at("grad_norm")) << i;
  }
  EXPECT_EQ(contents(folder / "kept/model.safetensors"), contents(folder / "again/model.safetensors"));
}

TEST_F(Cli, ResumesWithTheMetricsThatThereAre) {
  const std::string options = "--dropout 0.1 --out kept --checkpoint c --checkpoint-every 4";
  ASSERT_EQ(train(options).status, 0);
  const std::string name = "kept/metrics.jsonl", whole = contents(folder / name);
  const auto resumed = [&] { return train(options + " --resume"); };
  const auto expect_kept = [&](const std::string& before, const std::string& after) {
    write(name, before);
    const Outcome outcome = resumed();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_NE(outcome.out.find("resumed after step 12"), std::string::npos) << outcome.out;
    EXPECT_TRUE(contents(folder / name) == after) << before;
  };
  // Lines of steps after the checkpoint are removed, and a line that was not written completely.
  expect_kept(whole + "{\"step\":13,\"train_loss\":1}\n{}\n{\"step\": 1", whole);
  EXPECT_EQ(contents(folder / "kept/loss.svg").substr(0, 4), "<svg");
  const std::string not_finite = "{\"step\":1,\"train_loss\":null,\"val_loss\":2}\n";
  expect_kept(not_finite + "{\"step\":2,\"train_loss\":1}", not_finite);

  const auto expect_lost_nothing = [&](const std::string& lines, const std::string& message) {
    write(name, lines);
    mica::testing_support::expect_refused(resumed(), lines.substr(0, 80), 1, "kept/metrics.jsonl" + message);
    EXPECT_TRUE(contents(folder / name) == lines) << lines.substr(0, 80);
  };
  const std::string first = whole.substr(0, whole.find('\n') + 1);
  expect_lost_nothing(first + std::string(100, '\0') + "\n" + whole, ", line 2: it is not valid JSON");
  expect_lost_nothing("{\"step\":" + std::string(60000, '[') + "\n", ", line 1: it is nested more than 32 levels deep");
  expect_lost_nothing(std::string(100'000, ' ') + "\n" + whole,
                      ", line 1: it has 100000 bytes, expected at most 65536");
  expect_lost_nothing("{\"step\":1,\"step\":2,\"train_loss\":1}\n", ", line 1: the name \"step\" appears twice");
  expect_lost_nothing("{\"step\":-1,\"train_loss\":1}\n", ", line 1: expected an integer \"step\" of at least 1");
  expect_lost_nothing("{\"step\":1,\"train_loss\":\"1\"}\n", ", line 1: expected a number \"train_loss\"");

  fs::remove(folder / name);
  ASSERT_EQ(::mkfifo((folder / name).c_str(), 0600), 0);
  mica::testing_support::expect_refused(resumed(), "a FIFO", 1, "kept/metrics.jsonl is not a regular file");
  EXPECT_TRUE(fs::is_fifo(folder / name));
}

TEST_F(Cli, ResumesWithMoreSteps) {
  const std::string command =
      "train_transformer --data text.txt --device cpu --dtype float32 --batch 4 --context 16 --layers 1 --heads 2 "
      "--width 16 --threads 1 --sample 0 --lr 0.01 --min-lr 0.001 --out kept --checkpoint c ";
  ASSERT_EQ(run(command + "--steps 20 --eval-every 5").status, 0);
  const std::string first = contents(folder / "kept/metrics.jsonl");
  const std::string more = command + "--steps 40 --eval-every 8 --resume";
  const Outcome outcome = run(more);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("resumed after step 20\nsteps: 20 in the checkpoint, 40 from now on\n"
                             "eval-every: 5 in the checkpoint, 8 from now on\n"),
            std::string::npos)
      << outcome.out;
  EXPECT_TRUE(contents(folder / "kept/metrics.jsonl").starts_with(first));
  const auto lines = metrics("kept");
  ASSERT_EQ(lines.size(), 40u);
  // The warm-up is still 10 % of the steps of the first run.
  const mica::optim::CosineSchedule schedule{.peak = 0.01, .floor = 0.001, .warmup = 2, .total = 40};
  for (std::int64_t step = 21; step <= 40; ++step) {
    const nlohmann::json& line = lines[static_cast<std::size_t>(step - 1)];
    EXPECT_NEAR(line.at("lr").get<double>(), schedule.lr(step - 1), 1e-9) << step;
    EXPECT_EQ(line.contains("val_loss"), step % 8 == 0) << step;
  }

  const auto refused = [&](const std::string& options, const std::string& message) {
    const Outcome result = run(command + options + " --resume");
    mica::testing_support::expect_refused(result, options, 1, message);
    return result.err;
  };
  refused("--steps 39",
          "the checkpoint of step 40 in c: expected at least as many steps as were taken, got --steps 39");
  const std::string error = refused("--steps 50 --warmup 3", "warmup: 2 in the checkpoint, 3 now");
  EXPECT_EQ(error.find("steps:"), std::string::npos) << error;
  EXPECT_EQ(run(more).out.find("from now on"), std::string::npos);  // the checkpoint now has these settings
}

TEST_F(Cli, WritesToNoFifo) {
  for (const std::string name : {"metrics.jsonl", "trace.json", "loss.svg", "model.safetensors"}) {
    fs::create_directory(folder / "run");
    const fs::path fifo = folder / "run" / name;
    ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
    const Outcome outcome = train("--out run --profile --eval-every 12");
    mica::testing_support::expect_refused(outcome, name, 1, "run/" + name + " is not a regular file");
    EXPECT_TRUE(fs::is_fifo(fifo)) << name;
    fs::remove_all(folder / "run");
  }
}

TEST_F(Cli, Tf32ChangesNothingOnTheCpu) {
  ASSERT_EQ(train("--out exact").status, 0);
  ASSERT_EQ(train("--out tf32 --tf32").status, 0);
  EXPECT_EQ(contents(folder / "exact/model.safetensors"), contents(folder / "tf32/model.safetensors"));
}

TEST_F(Cli, AccumulatesGradients) {
  // Accumulating two batches of two windows equals one batch of four: the windows are the same, and so are the
  // gradients, up to rounding.
  ASSERT_EQ(train("--out one").status, 0);
  ASSERT_EQ(train("--out two --batch 2 --accumulate 2").status, 0);
  const auto one = metrics("one"), two = metrics("two");
  ASSERT_EQ(one.size(), two.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(one[i].at("train_loss").get<double>(), two[i].at("train_loss").get<double>(), 1e-4) << i;
    EXPECT_NEAR(one[i].at("grad_norm").get<double>(), two[i].at("grad_norm").get<double>(), 1e-3) << i;
  }
}

TEST_F(Cli, TrainsInSixteenBits) {
  ASSERT_EQ(train("--out whole").status, 0);
  const double whole = metrics("whole").back().at("val_loss");
  for (const std::string dtype : {"bfloat16", "float16"}) {
    const Outcome trained = train("--out half --dtype " + dtype);
    ASSERT_EQ(trained.status, 0) << trained.err;
    EXPECT_NE(trained.out.find("in " + dtype), std::string::npos) << trained.out;
    EXPECT_NEAR(metrics("half").back().at("val_loss").get<double>(), whole, 0.1) << dtype;
    EXPECT_EQ(run("generate --model half --tokens 5 --device cpu").status, 0);
  }
  const std::string expected = mica::has_fast_bfloat16(mica::Device::cpu()) ? "in bfloat16" : "in float32";
  const Outcome chosen = train("--out auto --dtype auto");
  EXPECT_NE(chosen.out.find(expected), std::string::npos) << chosen.out;
}

TEST_F(Cli, ProfilesSomeSteps) {
  ASSERT_EQ(train("--out plain").status, 0);
  const Outcome profiled = train("--out run --profile");
  ASSERT_EQ(profiled.status, 0) << profiled.err;
  for (const char* part :
       {"5 steps", "h.*.mlp", "CrossEntropyInPlace backward", "optimizer", "memory: weights", "workspace"}) {
    EXPECT_NE(profiled.out.find(part), std::string::npos) << part << "\n" << profiled.out;
  }
  const auto trace = nlohmann::json::parse(contents(folder / "run/trace.json"));
  EXPECT_GT(trace.at("traceEvents").size(), 100u);
  EXPECT_EQ(contents(folder / "run/model.safetensors"), contents(folder / "plain/model.safetensors"));
}

TEST_F(Cli, CudaGraphsChangeNothing) {
  if (!mica::cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  for (const std::string dtype : {"float32", "bfloat16", "float16"}) {
    const std::string more = "--device cuda --dropout 0.1 --layers 2 --accumulate 2 --steps 40 --dtype " + dtype;
    const Outcome replayed = train(more + " --out replayed");
    ASSERT_EQ(replayed.status, 0) << replayed.err;
    EXPECT_EQ(replayed.out.find("were not replayed"), std::string::npos) << replayed.out;
    ASSERT_EQ(train(more + " --no-cuda-graph --out plain").status, 0);
    const auto a = metrics("replayed"), b = metrics("plain");
    ASSERT_EQ(a.size(), 40u);
    ASSERT_EQ(b.size(), 40u);
    for (std::size_t i = 0; i < a.size(); ++i) {
      for (const char* name : {"step", "train_loss", "lr", "grad_norm"}) {
        EXPECT_EQ(a[i].at(name), b[i].at(name)) << dtype << ", step " << i + 1;
      }
    }
    EXPECT_EQ(contents(folder / "replayed/model.safetensors"), contents(folder / "plain/model.safetensors")) << dtype;
  }
}

TEST_F(Cli, OptionsOverridePresets) {
  ASSERT_EQ(train("--preset shakespeare-gpu --dropout 0 --lr 0.004 --warmup 0 --out run").status, 0);
  const auto lines = metrics("run");
  EXPECT_EQ(lines.size(), 12u);
  EXPECT_NEAR(lines[0].at("lr").get<double>(), 0.004, 1e-9);
  EXPECT_LT(lines[11].at("lr").get<double>(), 0.001);
}

TEST_F(Cli, TrainsOnATokenFile) {
  // The numbers 1 to 50, repeated, so that the next token is easy to learn.
  std::string plain;
  for (int i = 0; i < 3000; ++i) {
    plain += {static_cast<char>(1 + i % 50), 0};
  }
  std::string header(1024, '\0');
  const std::int32_t numbers[] = {20240520, 1, 3000};
  std::memcpy(header.data(), numbers, sizeof(numbers));
  write("plain.bin", plain);
  write("header.bin", header + plain);
  const std::string sizes =
      " --device cpu --threads 1 --steps 4 --batch 2 --accumulate 2 --context 16 --layers 1 --heads 2 --width 16"
      " --warmup 0 --lr 0.01 --dtype float32";
  for (const std::string file : {"plain", "header"}) {
    const Outcome trained = run("train_transformer --preset gpt2-124m --data " + file + ".bin --out " + file + sizes);
    ASSERT_EQ(trained.status, 0) << trained.err;
    EXPECT_NE(trained.out.find("3000 of 16 bits, vocabulary 50304"), std::string::npos) << trained.out;
  }
  const auto lines = metrics("plain");
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_NEAR(lines[0].at("train_loss").get<double>(), std::log(50304), 0.1);
  EXPECT_LT(lines[3].at("val_loss").get<double>(), lines[0].at("train_loss").get<double>() - 0.1);
  EXPECT_EQ(contents(folder / "plain/model.safetensors"), contents(folder / "header/model.safetensors"));
  const Outcome text = run("generate --model plain --tokens 5 --device cpu");
  EXPECT_EQ(text.status, 1);
  EXPECT_NE(text.err.find("its metadata lacks \"alphabet\""), std::string::npos) << text.err;

  // If the data has documents, attention stays within each.
  std::string documents = plain;
  for (std::size_t i = 0; i < documents.size(); i += 18) {
    documents[i] = '\x50';
    documents[i + 1] = '\xC4';  // 50256
  }
  write("documents.bin", documents);
  const std::string packed = "train_transformer --preset gpt2-124m --data documents.bin" + sizes + " --dropout 0.1";
  const Outcome within = run(packed + " --documents begin --recompute --out within");
  ASSERT_EQ(within.status, 0) << within.err;
  ASSERT_EQ(run(packed + " --out across").status, 0);
  EXPECT_NE(metrics("within")[3].at("val_loss"), metrics("across")[3].at("val_loss"));
  expect_refusal("train_transformer --data text.txt --documents end --out run" + sizes, 2,
                 "--documents: expected a .bin");

  // Errors in a file are reported before anything is written.
  expect_refusal("train_transformer --data plain.bin --out run --sample 5" + sizes, 2,
                 "--sample: plain.bin contains tokens");
  expect_refusal("train_transformer --data missing.bin --out run" + sizes, 1, "missing.bin");
  expect_refusal("train_transformer --data plain.bin --out run --context 400", 1, "plain.bin: expected more than 4000");
  write("cut.bin", header + plain.substr(0, 100));
  expect_refusal("train_transformer --data cut.bin --out run" + sizes, 1, "cut.bin");
  write("odd.bin", plain + "x");
  expect_refusal("train_transformer --data odd.bin --out run" + sizes, 1, "odd.bin");
}

TEST_F(Cli, Gpt2PresetsKeepTheirBiases) {
  const std::string small =
      " --device cpu --threads 1 --steps 2 --batch 2 --accumulate 1 --context 16 --layers 1 --heads 2 --width 16";
  const Outcome trained = run("train_transformer --preset gpt2-350m --data text.txt --out run" + small);
  ASSERT_EQ(trained.status, 0) << trained.err;
  EXPECT_EQ(run("generate --model run --tokens 5 --device cpu").status, 0);
  EXPECT_NE(contents(folder / "run/model.safetensors").find("h.0.mlp.c_fc.bias"), std::string::npos);
  const Outcome help = run("train_transformer --help");
  EXPECT_NE(
      help.out.find("gpt2-1558m: 19000 steps of 32 x 16 sequences of 1024 tokens; 48 layers, 25 heads, width 1600"),
      std::string::npos)
      << help.out;
}

TEST_F(Cli, StopsOnASignalAndKeepsTheModel) {
  // A shell script interrupts the run as soon as the first step has been recorded.
  const std::string line = "cd '" + folder.string() + "' && { '" + programs.string() +
                           "'/train_transformer --data text.txt --device cpu --steps 100000000 --batch 1 --context 8 "
                           "--layers 1 --heads 1 --width 8 --eval-every 100000000 --out run >out.txt 2>err.txt & "
                           "program=$!; for i in $(seq 600); do [ -s run/metrics.jsonl ] && break; sleep 0.1; done; "
                           "kill -INT $program; wait $program; }";
  EXPECT_EQ(std::system(line.c_str()), 0) << contents(folder / "err.txt");
  EXPECT_NE(contents(folder / "out.txt").find("stopped after"), std::string::npos);
  const auto lines = metrics("run");
  ASSERT_FALSE(lines.empty());
  EXPECT_TRUE(lines.back().contains("val_loss"));
  EXPECT_EQ(run("generate --model run --tokens 5 --device cpu").status, 0);
}

TEST_F(Cli, AFullDiskCutsNoLineOfTheMetrics) {
  // A file size limit stands for a full disk. Its unit, and so the number of lines that fit, depends on the shell.
  const std::string line = "cd '" + folder.string() + "' && trap '' XFSZ && ulimit -f 2 && exec '" + programs.string() +
                           "/train_transformer' --data text.txt --device cpu --steps 1000 --batch 1 --context 8 "
                           "--layers 1 --heads 1 --width 8 --eval-every 1000 --threads 1 --out run >out.txt 2>err.txt";
  const int status = std::system(line.c_str());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_NE(contents(folder / "err.txt").find("cannot write run/metrics.jsonl: File too large"), std::string::npos)
      << contents(folder / "err.txt");
  EXPECT_GE(metrics("run").size(), 3u);  // parses every line
  EXPECT_TRUE(contents(folder / "run/metrics.jsonl").ends_with("}\n"));
}

TEST_F(Cli, RunsOnTheBuiltInText) {
#ifdef MICA_ADDRESS_SANITIZER
  GTEST_SKIP() << "takes 14 s here; other tests run the same code on shorter texts";
#endif
  const Outcome trained =
      run("train_transformer --device cpu --steps 1 --batch 2 --context 8 --layers 1 --heads 1 "
          "--width 8 --sample 0 --out run");
  ASSERT_EQ(trained.status, 0) << trained.err;
  // The alphabet was that of C++ source code.
  EXPECT_EQ(run("generate --model run --prompt '#include <mica/mica.h> {};' --tokens 1").status, 0);
}

TEST_F(Cli, HelpSucceeds) {
  for (const std::string program : {"train_transformer", "generate"}) {
    const Outcome help = run(program + " --help");
    EXPECT_EQ(help.status, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_NE(help.out.find("--seed"), std::string::npos) << help.out;
  }
}

TEST_F(Cli, CustomOpPassesItsChecks) {
  const Outcome checked = run("custom_op");
  EXPECT_EQ(checked.status, 0) << checked.out << checked.err;
  EXPECT_EQ(checked.err, "");
  std::vector<std::string> devices{"cpu"};
  if (mica::cuda_available()) {
    devices.push_back("cuda:0");
  }
  for (const std::string& device : devices) {
    EXPECT_NE(checked.out.find(device + " gradcheck"), std::string::npos) << checked.out;
    EXPECT_NE(checked.out.find(device + " gradgradcheck"), std::string::npos) << checked.out;
    EXPECT_NE(checked.out.find(device + " bfloat16 [129, 257]"), std::string::npos) << checked.out;
  }
  EXPECT_EQ(checked.out.find("WRONG"), std::string::npos) << checked.out;
}

TEST_F(Cli, GpusNeedGpus) {
  const std::string train = "train_transformer --data text.txt --out run ";
  expect_refusal(train + "--gpus 0", 2, "--gpus");
  expect_refusal(train + "--gpus 2 --device cpu", 2, "--gpus: expected another --device than cpu");
  expect_refusal(train + "--gpus 1024", 1, "--gpus: expected at most the ");
}

TEST_F(Cli, RefusesBadCommandLines) {
  const std::string train = "train_transformer --data text.txt --out run ";
  expect_refusal(train + "--widht 3", 2, "--widht");
  expect_refusal(train + "extra", 2, "extra");
  expect_refusal(train + "--steps", 2, "--steps");
  expect_refusal(train + "--steps many", 2, "--steps");
  expect_refusal(train + "--steps 0", 2, "--steps");
  expect_refusal(train + "--steps -5", 2, "--steps");
  expect_refusal(train + "--batch 1.5", 2, "--batch");
  expect_refusal(train + "--context 99999999999999999999", 2, "--context");
  expect_refusal(train + "--seed -1", 2, "--seed");
  expect_refusal(train + "--dropout 1", 2, "--dropout");
  expect_refusal(train + "--dtype int64", 2, "--dtype");
  expect_refusal(train + "--accumulate 0", 2, "--accumulate");
  expect_refusal(train + "--lr nan", 2, "--lr");
  expect_refusal(train + "--lr 0", 2, "--lr");
  expect_refusal(train + "--preset large", 2, "--preset");
  expect_refusal(train + "--device tpu", 2, "--device");
  expect_refusal(train + "--width 100 --heads 3", 2, "expected a multiple of the 3 heads, got 100");
  expect_refusal(train + "--lr 1e-3 --min-lr 1e-2", 2, "--min-lr");
  expect_refusal(train + "--steps 10 --warmup 11", 2, "--warmup");
  expect_refusal(train + "--out ''", 2, "--out");
  expect_refusal("generate", 2, "--model");
  expect_refusal("generate --model run --top-k -1", 2, "--top-k");
  expect_refusal("generate --model run --temperature -1", 2, "--temperature");
  expect_refusal("generate --model run --temperature nan", 2, "--temperature");
  expect_refusal("generate --model run --top-p 0", 2, "--top-p");
  expect_refusal("generate --model run --repetition-penalty 0", 2, "--repetition-penalty");
  expect_refusal("generate --model run --prompt-tokens 1", 1, "cannot open the folder run");
  fs::create_directory(folder / "own");
  expect_refusal("generate --model own --prompt-tokens 1", 2, "--prompt-tokens is for Hugging Face models");
  expect_refusal("generate --model own --dtype bfloat16", 2, "--dtype is for Hugging Face models");
}

TEST_F(Cli, RefusesBadData) {
  write("empty.txt", "");
  write("short.txt", "to be or not to be");
  write("binary.txt", "abc\xFF\xFE");
  fs::create_directory(folder / "directory");
  expect_refusal("train_transformer --out run --data missing.txt", 1, "missing.txt");
  expect_refusal("train_transformer --out run --data empty.txt", 1, "empty.txt");
  expect_refusal("train_transformer --out run --data short.txt", 1, "short.txt");
  expect_refusal("train_transformer --out run --data binary.txt", 1, "binary.txt");
  expect_refusal("train_transformer --out run --data directory", 1, "directory");
  expect_refusal("train_transformer --out run --data text.txt --context 500", 1, "500");
}

TEST_F(Cli, RefusesAMissingGpu) {
  if (mica::cuda_available()) {
    GTEST_SKIP() << "there is a GPU";
  }
  expect_refusal("train_transformer --data text.txt --out run --device cuda", 1, "CUDA");
}

TEST_F(Cli, DrawsTheGraphOfTheFirstStep) {
  ASSERT_EQ(train("--out plain").status, 0);
  ASSERT_EQ(train("--out drawn --draw-graph graph.dot").status, 0);
  EXPECT_EQ(metrics("drawn").back().at("train_loss"), metrics("plain").back().at("train_loss"));
  const std::string graph = contents(folder / "graph.dot");
  EXPECT_NE(graph.find("label=\"h.0.mlp.c_fc (Linear)"), std::string::npos) << graph;
  EXPECT_NE(graph.find("[4, 16, 16] float32"), std::string::npos) << graph;  // batch, context, width
  EXPECT_NE(graph.find("CrossEntropy"), std::string::npos) << graph;
  const Outcome refused = train("--out run --draw-graph graph.png");
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.err.find("a name that ends in .dot or .svg, got graph.png"), std::string::npos) << refused.err;
}

TEST_F(Cli, RefusesAFolderItCannotWrite) {
  write("file", "something");
  const Outcome outcome = train("--out file/run");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.err.find("file/run"), std::string::npos) << outcome.err;
  EXPECT_EQ(train("--out file").status, 1);
  EXPECT_EQ(contents(folder / "file"), "something");
}

TEST_F(Cli, KeepsEarlierResultsWhereItRefuses) {
  ASSERT_EQ(train("--out keep").status, 0);
  const std::string model = contents(folder / "keep/model.safetensors");
  const std::string lines = contents(folder / "keep/metrics.jsonl");
  EXPECT_EQ(train("--out keep --width 15").status, 2);
  EXPECT_EQ(train("--out keep --context 5000").status, 1);
  EXPECT_EQ(train("--out keep --data missing.txt").status, 1);
  EXPECT_EQ(contents(folder / "keep/model.safetensors"), model);
  EXPECT_EQ(contents(folder / "keep/metrics.jsonl"), lines);
}

TEST_F(Cli, GenerateRefusesInvalidModels) {
  ASSERT_EQ(train("--out good").status, 0);
  const std::string model = contents(folder / "good/model.safetensors");
  fs::create_directory(folder / "bad");
  write("letters.txt", "abc");
  for (const char* const arguments :
       {"generate", "generate --prompt a", "generate --prompt-tokens 1", "finetune --data letters.txt --out run"}) {
    expect_refusal(std::string(arguments) + " --model missing", 1,
                   "load: cannot open the folder missing: No such file or directory");
    expect_refusal(std::string(arguments) + " --model letters.txt", 1, "load: letters.txt is not a folder");
  }
  expect_refusal("generate --model bad", 1, "bad");
  expect_refusal("generate --model good --prompt '☃'", 1, "U+2603");
  expect_refusal("generate --model good --prompt '\xFF'", 1, "UTF-8");

  const auto damaged = [&](const std::string& bytes) {
    write("bad/model.safetensors", bytes);
    expect_refusal("generate --model bad", 1, "bad/model.safetensors");
  };
  damaged("");
  damaged("not a model");
  damaged(model.substr(0, model.size() / 2));
  damaged(model.substr(0, 100));
  damaged(std::string(8, '\xFF') + model.substr(8));
  damaged(std::string("\x02\0\0\0\0\0\0\0{}", 10));

  // Metadata that do not match the tensors. The replacements keep the header's length.
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string bytes = model;
    const auto at = bytes.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    damaged(bytes.replace(at, from.size(), to));
  };
  replaced("\"width\":\"16\"", "\"width\":\"18\"");
  replaced("\"width\":\"16\"", "\"width\":\"-2\"");
  replaced("\"heads\":\"2\"", "\"heads\":\"3\"");
  replaced("\"heads\":\"2\"", "\"heads\":\"0\"");
  replaced("\"layers\":\"1\"", "\"layers\":\"9\"");
  replaced("\"width\":\"16\"", "\"depth\":\"16\"");
}

}  // namespace
