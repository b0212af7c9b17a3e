// Runs finetune on a small random model, with every kind of data and with bad input.

#include <gtest/gtest.h>
#include <tests/examples/programs.h>
#include <tests/folders.h>
#include <tests/paths.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/io/adapter.h>
#include <mica/io/pretrained.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
namespace fs = std::filesystem;

using testing_support::contents;
using testing_support::Outcome;

namespace {

/// The number that follows `words` in a program's output.
double number_behind(const std::string& text, const std::string& words) {
  const std::size_t at = text.find(words);
  EXPECT_NE(at, std::string::npos) << words << " is not in:\n" << text;
  return at == std::string::npos ? NAN : std::strtod(text.c_str() + at + words.size(), nullptr);
}

class Finetune : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(programs / "finetune")) {
      GTEST_SKIP() << "there is no " << programs / "finetune";
    }
    manual_seed(7);
    nn::Llama llama({.vocab = 610, .context = 48, .layers = 1, .heads = 2, .key_heads = 1, .width = 16, .hidden = 24});
    for (const Tensor& parameter : llama.parameters()) {
      if (parameter.dim() == 2) {
        parameter.set_data(randn(parameter.shape()) * 0.3);  // large enough that adapters can learn
      }
    }
    io::save_pretrained(llama, folder / "model");
    const fs::path tokenizer =
        fs::path(testing_support::folder_from("MICA_TOKENIZER_FIXTURES", MICA_TOKENIZER_FIXTURES)) / "two_files";
    for (const auto& file : fs::directory_iterator(tokenizer)) {
      fs::copy(file, folder / "model");
    }
    std::string lines, text;
    for (int i = 0; i < 40; ++i) {
      lines +=
          fmt::format(R"({{"prompt": "{} and {}", "completion": " make {}"}})", i % 7, i % 5, i % 7 + i % 5) + "\n";
      text += "The quick brown fox jumps over the lazy dog, as ever.\n";
    }
    write("sums.jsonl", "\n" + lines);
    write("text.txt", text);
    write("texts.jsonl",
          "{\"text\": \"a short one\"}\n{\"text\": \"" + text.substr(0, 53) + text.substr(0, 53) + "\"}");
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder / name, std::ios::binary) << text;
  }

  static std::string command_of(const std::string& options, const std::string& program) {
    return program + " --model model --device cpu --dtype float32 --threads 1 " + options;
  }

  Outcome run(const std::string& options, const std::string& program = "finetune") const {
    return testing_support::run_program(folder, programs, command_of(options, program));
  }

  /// Starts finetune and kills it after `seconds`.
  void run_and_kill(const std::string& options, const char* seconds) const {
    const std::string line = fmt::format("cd '{}' && timeout -s KILL {} '{}'/{} >killed.txt 2>&1", folder.string(),
                                         seconds, programs.string(), command_of(options, "finetune"));
    EXPECT_NE(std::system(line.c_str()), -1);
  }

  nn::Llama model() const { return io::load_pretrained<nn::Llama>(folder / "model", {.dtype = float32}); }

  /// The loss of the completions of every fifth line of sums.jsonl, one line at a time.
  double validation_loss(const nn::Llama& llama) const {
    const autograd::NoGrad no_grad;
    const io::Tokenizer tokenizer = io::Tokenizer::load(folder / "model");
    double sum = 0;
    std::int64_t count = 0;
    for (int i = 4; i < 40; i += 5) {
      std::vector<std::int64_t> tokens = tokenizer.encode(fmt::format("{} and {}", i % 7, i % 5));
      const std::vector<std::int64_t> answer = tokenizer.encode(fmt::format(" make {}", i % 7 + i % 5));
      std::vector<std::int64_t> targets(tokens.size() - 1, -100);
      tokens.insert(tokens.end(), answer.begin(), answer.end());
      targets.insert(targets.end(), answer.begin(), answer.end());
      targets.push_back(*tokenizer.eos_token());
      const auto learned = static_cast<std::int64_t>(answer.size()) + 1;
      const auto size = static_cast<std::int64_t>(tokens.size());
      sum +=
          llama.loss(from_data(tokens, {1, size}), from_data(targets, {1, size})).item() * static_cast<double>(learned);
      count += learned;
    }
    return sum / static_cast<double>(count);
  }

  void expect_refusal(const std::string& options, int status, const std::string& message) const {
    testing_support::expect_refused(run(options + " --out refused"), options, status, message);
    EXPECT_FALSE(fs::exists(folder / "refused")) << options;
  }

  const testing_support::TemporaryFolder own;
  const fs::path folder = own.path();
  const fs::path programs = testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS);
};

TEST_F(Finetune, LearnsCompletions) {
  const Outcome outcome =
      run("--data sums.jsonl --out adapter --steps 40 --batch 8 --lr 0.02 --rank 4 --validation 0.2 --eval-every 10 "
          "--tensorboard events");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("32 examples for training, 8 for validation"), std::string::npos) << outcome.out;
  const double before = number_behind(outcome.out, "before training: ");
  const double after = number_behind(outcome.out, "best validation loss ");
  nn::Llama llama = model();
  EXPECT_NEAR(before, validation_loss(llama), 1e-4);
  EXPECT_LT(after, before - 2);
  io::load_adapter(llama, folder / "adapter");
  EXPECT_EQ(nn::adapted_layers(llama).size(), 7u);  // all linear layers except the head
  EXPECT_EQ(nn::adapted_layers(llama)[0].layer->lora_options().rank, 4);
  EXPECT_NEAR(after, validation_loss(llama), 1e-4);
  nn::merge_lora(llama);
  EXPECT_NEAR(after, validation_loss(llama), 1e-3);
  const io::Tokenizer tokenizer = io::Tokenizer::load(folder / "model");
  const infer::GenerateOptions greedy{.count = 5, .sampling = {.temperature = 0}};
  const Outcome text = run("--adapter adapter --prompt '3 and 4' --tokens 5 --temperature 0", "generate");
  EXPECT_EQ(text.out,
            "3 and 4" + tokenizer.decode(infer::generate(llama, {tokenizer.encode("3 and 4")}, greedy)[0]) + "\n")
      << text.err;
  EXPECT_NE(run("--prompt '3 and 4' --tokens 5 --temperature 0", "generate").out, text.out);
  EXPECT_NE(contents(folder / "adapter/adapter_config.json").find("\"base_model_name_or_path\": \"model\""),
            std::string::npos);
  const std::string events = contents(fs::directory_iterator(folder / "events")->path());
  for (const char* const tag : {"loss/train", "loss/validation", "lr", "grad_norm"}) {
    EXPECT_NE(events.find(tag), std::string::npos) << tag;
  }
}

TEST_F(Finetune, LearnsAnswersOfChats) {
  const std::string answer = R"({"role": "assistant", "content": "fine, thanks"})";
  const std::string line = R"({"messages": [{"role": "user", "content": "how are you?"}, )" + answer + "]}\n";
  write("chat.jsonl", line + line);
  expect_refusal("--data chat.jsonl", 1, "chat.jsonl, line 1: ChatFormat: the tokenizer has no chat template");
  write("model/chat_template.jinja",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
  const Outcome outcome = run("--data chat.jsonl --validation 0.5 --steps 4 --lr 0.01");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const io::Tokenizer tokenizer = io::Tokenizer::load(folder / "model");
  const std::vector<std::int64_t> question =
      tokenizer.encode("<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n");
  const std::vector<std::int64_t> learned = tokenizer.encode("fine, thanks<|im_end|>");
  std::vector<std::int64_t> tokens = question, targets(question.size() - 1, -100);
  tokens.insert(tokens.end(), learned.begin(), learned.end() - 1);
  targets.insert(targets.end(), learned.begin(), learned.end());
  const auto size = static_cast<std::int64_t>(tokens.size());
  const double expected = model().loss(from_data(tokens, {1, size}), from_data(targets, {1, size})).item();
  EXPECT_NEAR(number_behind(outcome.out, "before training: "), expected, 1e-4);
  EXPECT_EQ(number_behind(outcome.out, "1 for validation, "), learned.size());

  write("asked.jsonl", R"({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})");
  write("alone.jsonl", "{\"messages\": [" + answer + "]}");
  expect_refusal("--data asked.jsonl", 1, "line 1: expected the last message to be the assistant's, got one of user");
  expect_refusal("--data alone.jsonl", 1, "line 1: expected a list of at least two messages");
  write("model/chat_template.jinja", "{{ raise_exception('no chats') }}");
  expect_refusal("--data chat.jsonl", 1, "line 1: chat template: no chats");
}

TEST_F(Finetune, LearnsTextsOnQuantizedWeights) {
  const std::string common = "--steps 6 --batch 4 --lr 0.05 --validation 0.1 --eval-every 3 --context 32 ";
  const Outcome full = run(common + "--data text.txt --out full --target '*q_proj,*down_proj'");
  ASSERT_EQ(full.status, 0) << full.err;
  EXPECT_NE(full.out.find("2 adapters of rank 8"), std::string::npos) << full.out;
  const double before = number_behind(full.out, "before training: ");
  EXPECT_LT(number_behind(full.out, "best validation loss "), before - 0.5);

  const Outcome quantized = run(common + "--data text.txt --out quantized --quantize 4 --recompute --accumulate 2");
  ASSERT_EQ(quantized.status, 0) << quantized.err;
  EXPECT_NE(quantized.out.find("linear layers in 4 bits"), std::string::npos) << quantized.out;
  const double rounded = number_behind(quantized.out, "before training: ");
  EXPECT_NE(rounded, before);
  EXPECT_NEAR(rounded, before, 0.1);
  EXPECT_LT(number_behind(quantized.out, "best validation loss "), rounded - 0.5);
  nn::Llama llama = model();
  nn::quantize(llama, 4);
  io::load_adapter(llama, folder / "quantized");
  EXPECT_EQ(nn::adapted_layers(llama).size(), 7u);
}

TEST_F(Finetune, AccumulatesBatchesAndDependsOnTheSeedAlone) {
  const std::string common = "--data sums.jsonl --steps 3 --lr 0.01 --schedule linear --dropout 0.1 ";
  ASSERT_EQ(run(common + "--batch 4 --out a").status, 0);
  ASSERT_EQ(run(common + "--batch 4 --out b").status, 0);
  ASSERT_EQ(run(common + "--batch 4 --seed 2 --out c").status, 0);
  const std::string file = "adapter_model.safetensors";
  EXPECT_EQ(contents(folder / "a" / file), contents(folder / "b" / file));
  EXPECT_NE(contents(folder / "a" / file), contents(folder / "c" / file));
  // Two accumulated batches, whose examples have different lengths, count as one batch.
  const std::string plain = "--data sums.jsonl --steps 3 --lr 0.01 --schedule constant --warmup 0 ";
  const Outcome one = run(plain + "--batch 8 --out one"), two = run(plain + "--batch 4 --accumulate 2 --out two");
  EXPECT_NEAR(number_behind(one.out, "training loss "), number_behind(two.out, "training loss "), 2e-4);
  // Texts may have any length; long ones are split.
  const Outcome texts = run("--data texts.jsonl --context 16 --steps 2 --out texts");
  ASSERT_EQ(texts.status, 0) << texts.err;
  const double examples = number_behind(texts.out, "texts.jsonl, ");
  EXPECT_GT(examples, 2);
}

// A run that was stopped by a signal, or by SIGKILL at any moment, and resumed gives the bits of an undisturbed run.
TEST_F(Finetune, ResumesWithTheSameBits) {
  const std::string common =
      "--data sums.jsonl --steps 24 --batch 4 --lr 0.02 --dropout 0.1 --pack --validation 0.2 --eval-every 5 "
      "--checkpoint-every 1 --resume ";
  const std::string file = "adapter_model.safetensors", last = "checkpoint-000000024.safetensors";
  ASSERT_EQ(run(common + "--out whole --checkpoint whole.c").status, 0);
  const std::string killed = common + "--out run --checkpoint run.c";
  for (const char* const moment : {"0.05", "0.1", "0.2", "0.3"}) {
    run_and_kill(killed, moment);
  }
  const Outcome end = run(killed);
  ASSERT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contents(folder / "run" / file) == contents(folder / "whole" / file)) << end.out;
  EXPECT_TRUE(contents(folder / "run.c" / last) == contents(folder / "whole.c" / last)) << end.out;
  const Outcome again = run(killed);  // has nothing left to do
  EXPECT_NE(again.out.find("resumed after step 24"), std::string::npos) << again.out << again.err;
  EXPECT_TRUE(contents(folder / "run" / file) == contents(folder / "whole" / file));
  expect_refusal(killed + " --rank 3", 1, "rank: 8 in the checkpoint, 3 now");
  expect_refusal("--data sums.jsonl --checkpoint run.c", 1, "run.c has checkpoints of another run");
  expect_refusal("--data sums.jsonl --resume", 2, "--resume: expected --checkpoint FOLDER with it");
}

TEST_F(Finetune, ResumesWithMoreSteps) {
  const std::string common = "--data sums.jsonl --batch 4 --lr 0.02 --validation 0.2 --out run --checkpoint run.c ";
  ASSERT_EQ(run(common + "--steps 40 --eval-every 20").status, 0);
  const Outcome more = run(common + "--steps 50 --eval-every 25 --resume");
  ASSERT_EQ(more.status, 0) << more.err;
  EXPECT_NE(more.out.find("resumed after step 40\nsteps: 40 in the checkpoint, 50 from now on\n"
                          "eval-every: 20 in the checkpoint, 25 from now on\n"),
            std::string::npos)
      << more.out;
  EXPECT_TRUE(fs::exists(folder / "run.c/checkpoint-000000050.safetensors"));
  expect_refusal(common + "--steps 49 --resume", 1, "expected at least as many steps as were taken, got --steps 49");
  const std::string warmup = common + "--steps 60 --warmup 2 --resume";
  const Outcome refused = run(warmup);
  testing_support::expect_refused(refused, warmup, 1, "warmup: 1 in the checkpoint, 2 now");
  EXPECT_EQ(refused.err.find("steps:"), std::string::npos) << refused.err;
}

// A checkpoint has the adapter only. So the base model's weights must be those that it was trained on, wherever their
// files are.
TEST_F(Finetune, ResumesOnTheSameBaseModelOnly) {
  const std::string common =
      "--data sums.jsonl --steps 2 --batch 4 --quantize 4 --checkpoint run.c --checkpoint-every 1 --out run";
  const std::string last = "run.c/checkpoint-000000002.safetensors";
  ASSERT_EQ(run(common).status, 0);
  const std::string before = contents(folder / last);
  // Accepted: the same tensors in another folder and in other files.
  fs::copy(folder / "model", folder / "moved");
  io::save_pretrained(model(), folder / "moved", {.shard_bytes = 40000});
  EXPECT_TRUE(fs::exists(folder / "moved/model.safetensors.index.json"));
  const Outcome moved = run(common + " --resume --model moved");
  EXPECT_EQ(moved.status, 0) << moved.err;
  EXPECT_NE(moved.out.find("resumed after step 2"), std::string::npos) << moved.out;

  // Refused: a change of one element of one tensor, or of one number of the configuration.
  const std::string message = "model: configuration and weights of fingerprint ";
  nn::Llama other = model();
  other.model.norm.weight.data<float>()[3] += 1e-3f;
  io::save_pretrained(other, folder / "moved");
  expect_refusal(common + " --resume --model moved", 1, message);
  nn::Llama same = model();
  same.config.norm_eps *= 2;
  io::save_pretrained(same, folder / "moved");
  expect_refusal(common + " --resume --model moved", 1, message);
  EXPECT_TRUE(contents(folder / last) == before);
}

TEST_F(Finetune, PackingChangesNoLoss) {
  const std::string plain = "--data sums.jsonl --steps 4 --batch 8 --lr 0.01 --validation 0.2 --eval-every 2 ";
  const Outcome one = run(plain + "--out one"), packed = run(plain + "--pack --recompute --out packed");
  ASSERT_EQ(packed.status, 0) << packed.err;
  for (const char* const what : {"before training: ", "best validation loss "}) {
    EXPECT_NEAR(number_behind(one.out, what), number_behind(packed.out, what), 2e-4);
  }
}

TEST_F(Finetune, Refuses) {
  write("empty.txt", " \n");
  write("empty.jsonl", "\n\n");
  write("torn.jsonl", "{\"text\": \"fine\"}\n\n{\"text\": \"to");
  write("other.jsonl", "{\"text\": \"fine\"}\n{\"question\": \"?\"}\n");
  write("number.jsonl", "{\"prompt\": \"fine\", \"completion\": 3}\n");
  write("list.jsonl", "[1]\n");
  write("long.jsonl", "{\"prompt\": \"1\", \"completion\": \"2\"}\n{\"prompt\": \"" + std::string(300, '~') +
                          "\", \"completion\": \"x\"}\n");
  expect_refusal("--data none.jsonl", 1, "cannot open none.jsonl");
  expect_refusal("--data empty.txt", 1, "empty.txt: the file is empty");
  expect_refusal("--data empty.jsonl", 1, "empty.jsonl: the file is empty");
  expect_refusal("--data torn.jsonl", 1, "torn.jsonl, line 3");
  expect_refusal("--data other.jsonl", 1,
                 "other.jsonl, line 2: expected \"text\", or \"prompt\" and \"completion\", or");
  expect_refusal("--data number.jsonl", 1, "number.jsonl, line 1: expected a string \"completion\"");
  expect_refusal("--data list.jsonl", 1, "list.jsonl, line 1: expected an object");
  expect_refusal("--data long.jsonl", 1, "long.jsonl, line 2: the example has");
  expect_refusal("--data text.txt --context 49", 2, "expected at most the model's 48 positions, got 49");
  expect_refusal("--data text.txt --target '*q_proj,nothing'", 1, "no linear layer's name matches nothing");
  expect_refusal("--data text.txt --quantize 5", 2, "--quantize: expected 8 or 4, got 5");
  expect_refusal("--data sums.jsonl --validation 0.01", 1,
                 "--validation: 0.01 of 40 examples is less than one example");
  EXPECT_EQ(run("--data long.jsonl --skip-long --steps 1 --out short").status, 0);
  fs::remove(folder / "model/vocab.json");
  expect_refusal("--data text.txt", 1, "model");
}

}  // namespace
