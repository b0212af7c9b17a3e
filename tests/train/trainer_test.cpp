// train::Trainer in one process. tests/train/document_test.cpp and tests/examples run whole programs.

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/files.h"
#include "tests/support.h"
#include "tests/train/toy.h"
#include <mica/core/copy.h>
#include <mica/io/safetensors.h>
#include <mica/optim/adamw.h>
#include <mica/train/trainer.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

struct Ended {
  train::Outcome outcome;
  std::string printed;
  StateDict weights;  // at the end
};

class TrainerOfAToy : public testing::Test {
 protected:
  train::TrainerOptions options() const {
    train::TrainerOptions options{.steps = 10, .eval_every = 4, .out = folder.path() / "out"};
    options.step.ema = 0.5;
    options.validation = train::Validation(data, {.batch = 35});
    return options;
  }

  Ended run(train::TrainerOptions options) const {
    ToyModel model;
    train::DatasetBatches batches(data, {.batch = 5, .seed = 1});
    optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
    Ended end;
    testing::internal::CaptureStdout();
    try {
      train::Trainer trainer(model, model.loss(), batches, optimizer, std::move(options));
      end.outcome = trainer.run();
      EXPECT_EQ(trainer.steps_done(), end.outcome.steps);
      fmt::print("{}", trainer.summary(end.outcome));
    } catch (...) {
      testing::internal::GetCapturedStdout();
      throw;
    }
    end.printed = testing::internal::GetCapturedStdout();
    end.weights = model.state_dict();
    return end;
  }

  const ToyData data{35};
  const TemporaryFolder folder;
};

TEST_F(TrainerOfAToy, KeepsTheBestModel) {
  std::vector<fs::path> saved;
  const Ended whole = run(options());
  EXPECT_EQ(whole.outcome.steps, 10);
  EXPECT_FALSE(whole.outcome.stopped);
  const StateDict best = io::load(folder.path() / "out/model.safetensors");
  EXPECT_EQ(best.size(), 4u);
  EXPECT_NE(io::fingerprint(best), io::fingerprint(whole.weights)) << "it has the averages";
  EXPECT_NE(whole.printed.find("best validation loss"), std::string::npos) << whole.printed;

  train::TrainerOptions own = options();
  own.save = [&](const fs::path& file) { saved.push_back(file); };
  run(std::move(own));
  ASSERT_FALSE(saved.empty());
  EXPECT_LE(saved.size(), 3u);
  EXPECT_EQ(saved[0], folder.path() / "out/model.safetensors");
}

TEST_F(TrainerOfAToy, PrintsWhatIsSaidAfterValidations) {
  train::TrainerOptions says = options();
  std::vector<std::int64_t> steps;
  says.after_validation = [&](std::int64_t step) {
    steps.push_back(step);
    return step == 8 ? "" : fmt::format("said after {}", step);
  };
  const Ended result = run(std::move(says));
  EXPECT_EQ(steps, (std::vector<std::int64_t>{4, 8, 10}));
  EXPECT_NE(result.printed.find("\nsaid after 4\n"), std::string::npos) << result.printed;
  EXPECT_NE(result.printed.find("\nsaid after 10\n"), std::string::npos) << result.printed;
}

TEST_F(TrainerOfAToy, WritesNothingWithoutAFolder) {
  train::TrainerOptions quiet = options();
  quiet.out = "";
  int saves = 0;
  quiet.save = [&](const fs::path& file) {
    EXPECT_EQ(file, "");
    ++saves;
  };
  quiet.validate_first = true;
  const Ended result = run(std::move(quiet));
  EXPECT_GE(saves, 1);
  EXPECT_NE(result.printed.find("validation loss before training: "), std::string::npos) << result.printed;
  EXPECT_EQ(result.printed.find("wrote"), std::string::npos) << result.printed;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_F(TrainerOfAToy, SavesTheLastModelWithoutValidation) {
  train::TrainerOptions plain = options();
  plain.validation = {};
  plain.step.ema = 0;
  const Ended result = run(std::move(plain));
  EXPECT_EQ(result.outcome.best.step, 10);
  EXPECT_NE(result.printed.find("; training loss "), std::string::npos) << result.printed;
  EXPECT_EQ(io::fingerprint(io::load(folder.path() / "out/model.safetensors")), io::fingerprint(result.weights));
  EXPECT_TRUE(fs::exists(folder.path() / "out/loss.svg"));
}

TEST_F(TrainerOfAToy, StopsAndResumesWithTheSameBits) {
  const Ended whole = run(options());
  fs::remove_all(folder.path() / "out");
  train::TrainerOptions first = options();
  first.checkpoint = {.folder = folder.path() / "c", .resume = true};
  first.settings = {{"seed", "1"}};
  int loaded = 0;
  first.on_save = [](io::TrainingCheckpoint& checkpoint) {
    checkpoint.parts["mine"] = {{"step", full({}, static_cast<double>(checkpoint.step), float64)}};
  };
  first.on_resume = [&](const io::TrainingCheckpoint& checkpoint) {
    EXPECT_EQ(checkpoint.part("mine").at("step").item(), static_cast<double>(checkpoint.step));
    ++loaded;
  };
  train::TrainerOptions second = first;
  first.step.schedule = [](std::int64_t step) {
    if (step == 5) {
      std::raise(SIGUSR1);
    }
    return 0.05;
  };
  const Ended stopped = run(std::move(first));
  EXPECT_TRUE(stopped.outcome.stopped);
  EXPECT_EQ(stopped.outcome.steps, 6);
  EXPECT_NE(stopped.printed.find("stopped at step 6; its checkpoint is in "), std::string::npos) << stopped.printed;
  const train::TrainerOptions third = second;
  const Ended resumed = run(std::move(second));
  EXPECT_EQ(loaded, 1);
  EXPECT_NE(resumed.printed.find("resumed after step 6\n"), std::string::npos) << resumed.printed;
  EXPECT_EQ(io::fingerprint(resumed.weights), io::fingerprint(whole.weights));
  EXPECT_EQ(resumed.outcome.best.loss, whole.outcome.best.loss);

  const auto refused = [&](train::TrainerOptions changed, const std::string& text) {
    expect_error([&] { run(std::move(changed)); }, text);
  };
  train::TrainerOptions changed = third;
  changed.settings["seed"] = "2";
  refused(changed, "seed: 1 in the checkpoint, 2 now");
  changed = third;
  changed.step.clip = 3;
  refused(changed, "clip: 0 in the checkpoint, 3 now");
  changed = third;
  changed.out = folder.path() / "other";
  refused(changed, "other/model.safetensors, the best model until step 10, is missing");
  changed = third;
  changed.checkpoint.resume = false;
  refused(changed, "has checkpoints of another run");
  // More steps are no difference.
  changed = third;
  changed.steps = 12;
  EXPECT_EQ(run(changed).outcome.steps, 12);
}

TEST_F(TrainerOfAToy, NamesTheStepWhoseLossIsNotFinite) {
  train::TrainerOptions options = this->options();
  options.step.schedule = [](std::int64_t step) { return step < 4 ? 0.01 : 1e30; };
  const auto advice = [&](train::ProgramNames names) {
    options.names = std::move(names);
    return [&] { run(options); };
  };
  expect_error(advice({}), "; a lower learning rate may help");
  expect_error(advice({.prefix = "--"}), " at step 6; a lower --lr may help");
}

TEST_F(TrainerOfAToy, Refuses) {
  train::TrainerOptions none = options();
  none.steps = 0;
  expect_error([&] { run(none); }, "Trainer: expected at least 1 step, and 1 between validations, got 0 and 4");
  train::TrainerOptions never = options();
  never.eval_every = 0;
  expect_error([&] { run(never); }, "got 10 and 0");
  EXPECT_FALSE(fs::exists(folder.path() / "out"));
}

}  // namespace
