#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/files.h"
#include "tests/support.h"
#include <mica/core/creation.h>
#include <mica/train/checkpoints.h>

using namespace mica;
using namespace mica::testing_support;
using train::Checkpoints;

namespace {

class CheckpointsOfARun : public testing::Test {
 protected:
  train::CheckpointOptions options(bool resume = true) const {
    return {.folder = folder.path() / "c", .every = 2, .keep = 3, .resume = resume};
  }
  static io::TrainingCheckpoint state(std::int64_t step) {
    return {.step = step, .parts = {{"model", {{"w", full({2}, static_cast<double>(step), float32)}}}}};
  }
  /// Writes a run's checkpoints of these steps.
  void write(const std::vector<std::int64_t>& steps) const {
    Checkpoints checkpoints(options(), {{"lr", "1"}, {"steps", "8"}, {"warmup", "1"}});
    for (const std::int64_t step : steps) {
      checkpoints.save(state(step));
    }
    checkpoints.finish();
  }

  const TemporaryFolder folder;
};

TEST_F(CheckpointsOfARun, DoNothingWithoutAFolder) {
  Checkpoints none({}, {});
  EXPECT_FALSE(none.on());
  EXPECT_FALSE(none.resume([](const io::TrainingCheckpoint&) { FAIL(); }));
  EXPECT_FALSE(none.is_due(2));
  none.save(state(2));
  none.finish();
}

TEST_F(CheckpointsOfARun, AreDueAndResumed) {
  {
    Checkpoints checkpoints(options(false), {{"lr", "1"}});
    EXPECT_FALSE(checkpoints.resume([](const io::TrainingCheckpoint&) { FAIL(); }));
    EXPECT_FALSE(checkpoints.is_due(1));
    EXPECT_TRUE(checkpoints.is_due(2));
    EXPECT_TRUE(checkpoints.is_due(3)) << "it was not saved";
    checkpoints.save(state(3));
    checkpoints.finish();
    EXPECT_FALSE(checkpoints.is_due(5));
  }
  Checkpoints resumed(options(), {{"lr", "1"}});
  std::int64_t step = 0;
  EXPECT_TRUE(resumed.resume([&](const io::TrainingCheckpoint& saved) {
    step = saved.step;
    EXPECT_EQ(saved.settings, (io::Metadata{{"lr", "1"}}));
  }));
  EXPECT_EQ(step, 3);
  EXPECT_EQ(resumed.changes(), "");
}

TEST_F(CheckpointsOfARun, AcceptChangesOfSomeSettings) {
  write({6});
  const train::ChangeableSettings changeable{.changed = {"steps"}, .kept = {"warmup"}};
  {
    Checkpoints more(options(), {{"lr", "1"}, {"steps", "12"}, {"warmup", "3"}}, changeable);
    EXPECT_TRUE(more.resume([](const io::TrainingCheckpoint&) {}));
    EXPECT_EQ(more.changes(), "steps: 8 in the checkpoint, 12 from now on\n");
    more.save(state(12));
    more.finish();
  }
  Checkpoints again(options(), {{"lr", "1"}, {"steps", "12"}, {"warmup", "5"}}, changeable);
  EXPECT_TRUE(again.resume([](const io::TrainingCheckpoint& saved) {
    EXPECT_EQ(saved.settings.at("steps"), "12");
    EXPECT_EQ(saved.settings.at("warmup"), "1");
  }));
}

TEST_F(CheckpointsOfARun, RefuseWhatDoesNotFit) {
  write({6});
  const io::Metadata settings{{"lr", "1"}, {"steps", "8"}, {"warmup", "1"}};
  expect_error([&] { Checkpoints(options(false), settings); }, "has checkpoints of another run: resume it with resume");
  expect_error([&] { Checkpoints(options(false), settings, {}, {.prefix = "--"}); }, "resume it with --resume, or use");
  const auto resume = [&](const io::Metadata& other, const std::function<void(io::TrainingCheckpoint&)>& restore) {
    Checkpoints(options(), other, {.changed = {"steps"}}).resume(restore);
  };
  const auto ignore = [](const io::TrainingCheckpoint&) {};
  expect_error(
      [&] {
        resume({{"lr", "2"}, {"steps", "8"}, {"warmup", "1"}}, ignore);
      },
      "the settings differ from the checkpoint's:\n  lr: 1 in the checkpoint, 2 now");
  expect_error(
      [&] {
        resume({{"lr", "1"}, {"steps", "5"}, {"warmup", "1"}}, ignore);
      },
      "expected at least as many steps as were taken, got steps 5");
  const std::string name = "cannot resume from the checkpoint of step 6 in " + options().folder + ": ";
  expect_error([&] { resume(settings, [](const io::TrainingCheckpoint&) { fail("no"); }); }, name + "no");
  train::CheckpointOptions never = options();
  never.every = 0;
  expect_error([&] { Checkpoints(never, settings); }, "expected at least 1 step between checkpoints, got 0");
  expect_error([&] { train::number_of(settings, "batch"); }, "no whole number of batch");
  expect_error([&] { train::number_of({{"batch", "3x"}}, "batch"); }, "no whole number of batch");
}

TEST_F(CheckpointsOfARun, SkipADamagedOneAndSaySo) {
  write({4, 6});
  std::filesystem::resize_file(folder.path() / "c/checkpoint-000000006.safetensors", 50);
  Checkpoints resumed(options(), {{"lr", "1"}, {"steps", "8"}, {"warmup", "1"}}, {}, {.program = "toy"});
  std::int64_t step = 0;
  testing::internal::CaptureStderr();
  EXPECT_TRUE(resumed.resume([&](const io::TrainingCheckpoint& saved) { step = saved.step; }));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(step, 4);
  EXPECT_EQ(said.find("toy: skipped a checkpoint: load: "), 0u) << said;
}

}  // namespace
