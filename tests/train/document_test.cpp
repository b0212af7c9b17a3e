// Runs the program of docs/training.md, a trainer for a model of its own.

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <tests/examples/programs.h>
#include <tests/folders.h>
#include <tests/paths.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <string>
#include <vector>

#include <mica/io/safetensors.h>
#include <mica/io/training_checkpoint.h>

namespace fs = std::filesystem;

using mica::testing_support::contents;
using mica::testing_support::Outcome;

namespace {

class Document : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(programs / "spirals")) {
      GTEST_SKIP() << "there is no " << programs / "spirals";
    }
    for (const char* const name : {"whole", "stopped"}) {
      fs::create_directory(folder / name);
    }
  }

  /// Runs the program in a folder, after words of a shell.
  Outcome run(const std::string& in, const std::string& before = "timeout 60") const {
    return mica::testing_support::run_line(
        folder / in, "OMP_NUM_THREADS=1 " + before + " '" + (programs / "spirals").string() + "'");
  }

  /// Metrics without times.
  std::string metrics(const std::string& in) const {
    return std::regex_replace(contents(folder / in / "spirals/metrics.jsonl"),
                              std::regex("\"(samples_per_second|step_ms|peak_memory_bytes)\":[^,}]*"), "");
  }

  const mica::testing_support::TemporaryFolder own;
  const fs::path folder = own.path();
  const fs::path programs = mica::testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS);
  const std::string last = "spirals/checkpoints/checkpoint-000000400.safetensors";
};

TEST_F(Document, ProgramLearnsAndResumesWithTheSameBits) {
  const Outcome whole = run("whole");
  ASSERT_EQ(whole.status, 0) << whole.err;
  EXPECT_EQ(whole.err, "");
  for (const char* const part : {"spirals/checkpoints has no complete checkpoint: starting at step 1", "step 400/400",
                                 "samples/s", "done after ", "wrote spirals/model.safetensors"}) {
    EXPECT_NE(whole.out.find(part), std::string::npos) << part << "\n" << whole.out;
  }
  const std::string lines = contents(folder / "whole/spirals/metrics.jsonl");
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 400);
  const std::string end = lines.substr(lines.rfind('\n', lines.size() - 2) + 1);
  EXPECT_LT(nlohmann::json::parse(end).at("val_loss").get<double>(), 0.3) << "guessing has 0.69";
  EXPECT_EQ(contents(folder / "whole/spirals/loss.svg").substr(0, 4), "<svg");
  const std::string events = contents(fs::directory_iterator(folder / "whole/spirals/events")->path());
  EXPECT_NE(events.find("weights/first.weight"), std::string::npos);
  // The model is the averages.
  const auto checkpoint = mica::io::load_training_checkpoint(folder / "whole" / last);
  EXPECT_EQ(checkpoint.part("ema").size(), 4u);
  EXPECT_EQ(mica::io::load(folder / "whole/spirals/model.safetensors").size(), 4u);

  // Stopped by a signal, then killed at any moment.
  for (const char* const how : {"timeout -s USR1 0.3", "timeout -s KILL 0.1", "timeout -s KILL 0.3"}) {
    run("stopped", how);
  }
  const Outcome resumed = run("stopped");
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_EQ(metrics("stopped"), metrics("whole"));
  for (const std::string& file : {std::string("spirals/model.safetensors"), last}) {
    EXPECT_TRUE(contents(folder / "stopped" / file) == contents(folder / "whole" / file)) << file;
  }
  const Outcome again = run("stopped");
  EXPECT_NE(again.out.find("resumed after step 400\ndone after 0 s"), std::string::npos) << again.out;
}

TEST_F(Document, ProgramRunsOnSeveralRanks) {
#if defined(MICA_ADDRESS_SANITIZER) || defined(MICA_THREAD_SANITIZER)
  GTEST_SKIP() << "MPI's own library is reported";
#endif
  if (MICA_WITH_MPI == 0 || std::system("command -v mpirun >/dev/null") != 0) {
    GTEST_SKIP() << "no MPI";
  }
  const Outcome outcome = run("whole", "timeout 60 '" MICA_SCRIPTS "/ranks' 2");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const std::size_t first = outcome.out.find("done after ");
  EXPECT_NE(first, std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("done after ", first + 1), std::string::npos) << outcome.out;
  EXPECT_EQ(mica::io::load_training_checkpoint(folder / "whole" / last).step, 400);
}

}  // namespace
