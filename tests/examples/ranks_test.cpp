// Runs train_transformer with several ranks on this machine, and compares the results with those of one process.

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <tests/examples/programs.h>
#include <tests/folders.h>
#include <tests/paths.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/device.h>
#include <mica/io/training_checkpoint.h>

namespace fs = std::filesystem;

using mica::testing_support::contents;
using mica::testing_support::Outcome;

namespace {

class Ranks : public testing::Test {
 protected:
  void SetUp() override {
#if defined(MICA_ADDRESS_SANITIZER) || defined(MICA_THREAD_SANITIZER)
    GTEST_SKIP() << "MPI's own library is reported";
#endif
    if (!fs::exists(programs / "train_transformer")) {
      GTEST_SKIP() << "the example programs are not at " << programs;
    }
    if (MICA_WITH_MPI == 0 || std::system("command -v mpirun >/dev/null") != 0) {
      GTEST_SKIP() << "no MPI";
    }
    std::ofstream text(folder / "text.txt", std::ios::binary);
    for (int i = 0; i < 100; ++i) {
      text << "the quick brown fox → jumps over the lazy dog\n";
    }
  }

  /// Runs `command`, a program in build/bin and its options, with `ranks` ranks.
  Outcome run(int ranks, const std::string& command) const {
    // By default, mpirun waits for two seconds after an error.
    return mica::testing_support::run_line(
        folder, "OMPI_MCA_odls_base_sigkill_timeout=0 timeout 60 '" MICA_SCRIPTS "/ranks' " + std::to_string(ranks) +
                    " '" + programs.string() + "'/" + command);
  }

  static std::string training(const std::string& more) {
    return "train_transformer --data text.txt --device cpu --dtype float32 --steps 12 --batch 12 --context 16 "
           "--layers 1 --heads 2 --width 16 --eval-every 5 --threads 1 --sample 0 " +
           more;
  }
  Outcome train(int ranks, const std::string& more) const {
    const Outcome outcome = run(ranks, training(more));
    EXPECT_EQ(outcome.status, 0) << more << "\n" << outcome.out << outcome.err;
    return outcome;
  }

  std::vector<nlohmann::json> metrics(const std::string& out) const {
    std::vector<nlohmann::json> lines;
    std::istringstream text(contents(folder / out / "metrics.jsonl"));
    for (std::string line; std::getline(text, line);) {
      lines.push_back(nlohmann::json::parse(line));
      for (const char* name : {"tokens_per_second", "step_ms", "peak_memory_bytes"}) {
        lines.back().erase(name);
      }
    }
    return lines;
  }

  /// Expects that two runs of the same steps have the same metrics, up to rounding.
  void expect_close(const std::string& a, const std::string& b, double bound) const {
    const auto first = metrics(a), second = metrics(b);
    ASSERT_EQ(first.size(), 12u);
    ASSERT_EQ(second.size(), 12u);
    for (std::size_t i = 0; i < first.size(); ++i) {
      for (const char* name : {"train_loss", "grad_norm", "val_loss"}) {
        ASSERT_EQ(first[i].contains(name), second[i].contains(name)) << i;
        if (first[i].contains(name)) {
          EXPECT_NEAR(first[i].at(name).get<double>(), second[i].at(name).get<double>(), bound) << name << " " << i;
        }
      }
    }
  }

  bool same_file(const std::string& a, const std::string& b) const {
    const std::string bytes = contents(folder / a);
    return !bytes.empty() && bytes == contents(folder / b);
  }

  std::string checkpoint_of(const std::string& out, int step) const {
    const std::string number = std::to_string(step);
    return out + "/checkpoint-" + std::string(9 - number.size(), '0') + number + ".safetensors";
  }

  const mica::testing_support::TemporaryFolder own;
  const fs::path folder = own.path();
  const fs::path programs = mica::testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS);
};

TEST_F(Ranks, LookLikeOneProgramAndDifferFromOneRankByRounding) {
  train(1, "--out one --accumulate 2");
  const std::vector<std::pair<int, std::string>> cases{{2, ""}, {4, ""}, {4, " --zero"}, {1, " --zero"}};
  for (const auto& [ranks, optimizer] : cases) {
    const Outcome outcome = train(ranks, "--out several --accumulate 2 --sample 10" + optimizer);
    expect_close("one", "several", 1e-5);
    for (const char* line : {"text: ", "model: ", "step 12/12", "done after", "--- a sample ---"}) {
      const std::size_t first = outcome.out.find(line);
      EXPECT_NE(first, std::string::npos) << outcome.out;
      EXPECT_EQ(outcome.out.find(line, first + 1), std::string::npos) << outcome.out;
    }
    EXPECT_EQ(outcome.out.find('\r'), std::string::npos) << "there is no terminal";
    EXPECT_EQ(outcome.err, "");
    std::vector<std::string> files;
    for (const auto& entry : fs::directory_iterator(folder / "several")) {
      files.push_back(entry.path().filename());
    }
    std::sort(files.begin(), files.end());
    EXPECT_EQ(files, (std::vector<std::string>{"loss.svg", "metrics.jsonl", "model.safetensors"}));
  }
}

TEST_F(Ranks, OneIsAProgramStartedAlone) {
  const std::string options = training("--dropout 0.1 --checkpoint-every 4 --ema 0.9 ");
  const Outcome alone = mica::testing_support::run_program(folder, programs, options + "--out a --checkpoint a.saved");
  ASSERT_EQ(alone.status, 0) << alone.err;
  ASSERT_EQ(run(1, options + "--out b --checkpoint b.saved").status, 0);
  EXPECT_EQ(metrics("a"), metrics("b"));
  EXPECT_TRUE(same_file("a/model.safetensors", "b/model.safetensors"));
  EXPECT_TRUE(same_file(checkpoint_of("a.saved", 12), checkpoint_of("b.saved", 12)));
}

TEST_F(Ranks, GiveTheSameBitsEachTime) {
  for (const std::string dtype : {"float32", "bfloat16 --zero --reduce-float32"}) {
    const std::string options = "--dropout 0.1 --ema 0.9 --dtype " + dtype;
    train(4, options + " --out a --checkpoint a.saved");
    train(4, options + " --out b --checkpoint b.saved");
    EXPECT_EQ(metrics("a"), metrics("b"));
    EXPECT_TRUE(same_file("a/model.safetensors", "b/model.safetensors"));
    EXPECT_TRUE(same_file(checkpoint_of("a.saved", 12), checkpoint_of("b.saved", 12)));
    fs::remove_all(folder / "a.saved");
    fs::remove_all(folder / "b.saved");
    train(2, options + " --out c");
    EXPECT_NE(metrics("a"), metrics("c")) << "dropout differs by rank";
  }
}

TEST_F(Ranks, ResumeWithTheSameBitsAndOnAnotherNumberOfRanks) {
  // Saves the state after step 6 of a run of 12 steps.
  const std::string saving = " --checkpoint-every 6 --keep 2 --resume --checkpoint ";
  const auto cut = [&](const std::string& from, const std::string& to) {
    fs::create_directories(folder / to);
    fs::copy(folder / checkpoint_of(from, 6), folder / checkpoint_of(to, 6));
  };
  train(4, "--dropout 0.1 --out whole" + saving + "whole.saved");
  cut("whole.saved", "same.saved");
  fs::copy(folder / "whole", folder / "same");
  const Outcome resumed = train(4, "--dropout 0.1 --out same" + saving + "same.saved");
  EXPECT_NE(resumed.out.find("resumed after step 6"), std::string::npos) << resumed.out;
  EXPECT_EQ(metrics("whole"), metrics("same"));
  EXPECT_TRUE(same_file(checkpoint_of("whole.saved", 12), checkpoint_of("same.saved", 12)));

  // Without dropout, any number of ranks can resume: they continue with the next sample, and have the same gradients up
  // to rounding.
  train(4, "--out four" + saving + "four.saved");
  for (const int ranks : {1, 2, 3}) {
    const std::string out = "from_four_" + std::to_string(ranks);
    cut("four.saved", out + ".saved");
    fs::copy(folder / "four", folder / out);
    train(ranks, (ranks == 2 ? "--zero --out " : "--out ") + out + saving + out + ".saved");
    expect_close("four", out, 1e-5);
    const auto a = mica::io::load_training_checkpoint(folder / checkpoint_of("four.saved", 12)),
               b = mica::io::load_training_checkpoint(folder / checkpoint_of(out + ".saved", 12));
    EXPECT_EQ(a.data, b.data);
    EXPECT_EQ(a.step, b.step);
  }
}

TEST_F(Ranks, StopAtTheSameStepIfOneIsAskedTo) {
  const std::string program = "sh -c 'echo $$ > pid.$OMPI_COMM_WORLD_RANK && exec \"$0\" \"$@\"' '" +
                              (programs / "train_transformer").string() + "'";
  const std::string options =
      " --data text.txt --device cpu --steps 100000000 --batch 4 --context 8 --layers 1 --heads 1 --width 8 "
      "--eval-every 100000000 --out run --checkpoint saved --checkpoint-every 100000000";
  const std::string line = "cd '" + folder.string() + "' && { timeout 60 '" MICA_SCRIPTS "/ranks' 4 " + program +
                           options +
                           " >out.txt 2>err.txt & ranks=$!; for i in $(seq 300); do [ -s run/metrics.jsonl ] && break; "
                           "sleep 0.1; done; kill -USR1 $(cat pid.2); wait $ranks; }";
  EXPECT_EQ(std::system(line.c_str()), 0) << contents(folder / "out.txt") << contents(folder / "err.txt");
  const std::string out = contents(folder / "out.txt");
  const auto lines = metrics("run");
  ASSERT_FALSE(lines.empty());
  const int last = lines.back().at("step");
  EXPECT_NE(out.find("stopped at step " + std::to_string(last) + ";"), std::string::npos) << out;
  EXPECT_EQ(mica::io::load_training_checkpoint(folder / checkpoint_of("saved", last)).step, last);
}

TEST_F(Ranks, ReportErrorsOnce) {
  const auto refuses = [&](const std::string& command, int status, const std::string& text) {
    const Outcome outcome = run(2, command);
    EXPECT_EQ(outcome.status, status) << command << "\n" << outcome.err;
    const std::size_t first = outcome.err.find(text);
    EXPECT_NE(first, std::string::npos) << command << "\n" << outcome.err;
    EXPECT_EQ(outcome.err.find(text, first + 1), std::string::npos) << command << "\n" << outcome.err;
    EXPECT_EQ(outcome.err.find("rank 1: "), std::string::npos) << outcome.err;
    EXPECT_FALSE(fs::exists(folder / "run"));
  };
  refuses("train_transformer --batch 3 --out run", 2, "--batch: expected a multiple of the 2 ranks, got 3");
  refuses("train_transformer --widht 3 --out run", 2, "--widht");
  refuses("generate --model run", 2, "generate runs as one process, but was started as 2 ranks");
  refuses("finetune --model run --data text.txt --out run", 2, "finetune runs as one process");
  // An error that only rank 0 detects.
  train(1, "--out one --checkpoint saved");
  refuses(training("--out run --checkpoint saved"), 1, "saved has checkpoints of another run");
  refuses(training("--lr 0.5 --out run --checkpoint saved --resume"), 1,
          "cannot resume from the checkpoint of step 12");
  refuses(training("--out text.txt/run"), 1, "cannot create the folder");
  // Errors that each rank detects name the rank.
  const Outcome missing = run(2, "train_transformer --data missing.txt --out run");
  EXPECT_EQ(missing.status, 1);
  for (const std::string rank : {"", "rank 1: "}) {
    const std::string expected = "train_transformer: " + rank + "load: cannot open missing.txt";
    EXPECT_NE(missing.err.find(expected), std::string::npos) << missing.err;
  }
}

}  // namespace
