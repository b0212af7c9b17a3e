#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "tests/files.h"
#include "tests/support.h"
#include "tests/train/toy.h"
#include <mica/train/metrics_log.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

constexpr train::StepMetrics second_step{.step = 2,
                                         .train_loss = 0.5,
                                         .lr = 0.25,
                                         .grad_norm = 2,
                                         .validation_loss = 1,
                                         .seconds = 0.5,
                                         .speed = {.units_per_second = 8, .share_of_peak = 0.5, .peak_memory = 3}};

TEST(MetricsLog, WritesALineAStep) {
  const TemporaryFolder folder;
  const fs::path out = folder.path() / "out";
  train::MetricsLog log({.folder = out, .unit = "images"});
  log.add({.step = 1, .train_loss = std::numeric_limits<double>::quiet_NaN()});
  log.add(second_step);
  EXPECT_EQ(contents(out / "metrics.jsonl"),
            "{\"step\":1,\"train_loss\":null,\"lr\":0.0,\"grad_norm\":0.0,\"images_per_second\":0.0,\"step_ms\":0.0,"
            "\"peak_memory_bytes\":0}\n"
            "{\"step\":2,\"train_loss\":0.5,\"lr\":0.25,\"grad_norm\":2.0,\"images_per_second\":8.0,\"step_ms\":500.0,"
            "\"peak_memory_bytes\":3,\"share_of_peak\":0.5,\"val_loss\":1.0}\n");
  EXPECT_FALSE(fs::exists(out / "loss.svg"));
  log.draw_losses();
  const std::string picture = contents(out / "loss.svg");
  EXPECT_EQ(picture.substr(0, 4), "<svg");
  EXPECT_NE(picture.find("validation"), std::string::npos);
}

TEST(MetricsLog, ContinuesAfterTheStepsThatWereTaken) {
  const TemporaryFolder folder;
  const fs::path file = folder.path() / "metrics.jsonl";
  std::string picture;
  {
    train::MetricsLog log({.folder = folder.path()});
    log.add({.step = 1, .train_loss = 3});
    log.add(second_step);
    log.draw_losses();
    picture = contents(folder.path() / "loss.svg");
    log.add({.step = 3, .train_loss = 7});
  }
  const std::string three = contents(file);
  train::MetricsLog log({.folder = folder.path(), .steps_done = 2});
  EXPECT_EQ(contents(file), three.substr(0, three.find("{\"step\":3")));
  log.draw_losses();
  EXPECT_EQ(contents(folder.path() / "loss.svg"), picture);
  log.add({.step = 3, .train_loss = 7});
  EXPECT_EQ(contents(file), three);
  // A new run starts over.
  train::MetricsLog other({.folder = folder.path()});
  EXPECT_EQ(contents(file), "");
  std::ofstream(file) << "{}\n";
  expect_error([&] { train::MetricsLog({.folder = folder.path(), .steps_done = 2}); },
               "metrics.jsonl, line 1: expected an integer \"step\"");
  EXPECT_EQ(contents(file), "{}\n");
}

TEST(MetricsLog, WritesEventsWithOrWithoutAFolder) {
  const TemporaryFolder folder;
  train::MetricsLog log({.tensorboard = folder.path() / "events"});
  log.add(second_step);
  log.draw_losses();
  log.text("about", "a *test*");
  log.scalar("accuracy", 0.5, 2);
  ToyModel model;
  model.last.bias.requires_grad_(false);
  log.histograms(model, 2);
  const std::string events = contents(fs::directory_iterator(folder.path() / "events")->path());
  for (const char* const tag : {"loss/train", "loss/validation", "lr", "grad_norm", "samples_per_second", "a *test*",
                                "accuracy", "weights/first.weight"}) {
    EXPECT_NE(events.find(tag), std::string::npos) << tag;
  }
  EXPECT_EQ(events.find("weights/last.bias"), std::string::npos);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

}  // namespace
