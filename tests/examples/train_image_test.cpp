// Runs train_image on small images.

#include <gtest/gtest.h>
#include <tests/examples/programs.h>
#include <tests/folders.h>
#include <tests/paths.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/io/image.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;

namespace train_image_test {

namespace fs = std::filesystem;
using testing_support::contents;
using testing_support::Outcome;

class TrainImage : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(programs / "train_image") || !MICA_READS_IMAGES) {
      GTEST_SKIP() << "there is no " << programs / "train_image"
                   << ", or mica was built without libpng";
    }
  }

  /// Noisy images whose upper or lower half is bright.
  void write_images(const fs::path& data, int each) const {
    manual_seed(1);
    for (const char* const name : {"lower", "upper"}) {
      fs::create_directories(data / name);
      for (int i = 0; i < each; ++i) {
        const Tensor image = rand({1, 12, 12});
        for (std::int64_t at = 0; at < 144; ++at) {
          image.data<float>()[at] *= (at < 72) == (*name == 'u') ? 1.0f : 0.3f;
        }
        io::write_png(data / name / (std::to_string(i) + ".png"), image);
      }
    }
  }

  Outcome run(const std::string& options) const {
    return testing_support::run_program(folder.path(), programs, "train_image --device cpu --threads 1 " + options);
  }
  std::string run_well(const std::string& options) const {
    const Outcome outcome = run(options);
    EXPECT_EQ(outcome.status, 0) << options << "\n" << outcome.out << outcome.err;
    return outcome.out;
  }

  const fs::path programs = testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS);
  testing_support::TemporaryFolder folder;
};

TEST_F(TrainImage, LearnsFromAFolderOfImagesAndResumes) {
  write_images(folder.path() / "data/train", 40);
  write_images(folder.path() / "data/test", 10);
  const std::string options = "--data data --batch 16 --epochs 4 --checkpoint checkpoints --out out --size 16";
  const std::string text = run_well(options);
  EXPECT_NE(text.find("80 images for training and 20 for the test, 2 classes, 16 × 16 pixels"), std::string::npos);
  for (const char* const words : {"epoch 1: ", "epoch 4: ", "% of 20 test images are right", "lower", "upper"}) {
    EXPECT_NE(text.find(words), std::string::npos) << words << "\n" << text;
  }
  const std::size_t at = text.find("the best model: ");
  EXPECT_GE(std::strtod(text.c_str() + at + 16, nullptr), 80) << text;
  const std::string picture = contents(folder.path() / "out/mistakes.svg");
  EXPECT_TRUE(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
  EXPECT_NE(picture.find("of 20 are wrong"), std::string::npos);

  // Without its last checkpoint, the run goes on to the same bits.
  const std::string model = contents(folder.path() / "out/model.safetensors");
  const std::string metrics = contents(folder.path() / "out/metrics.jsonl");
  ASSERT_TRUE(fs::remove(folder.path() / "checkpoints/checkpoint-000000020.safetensors"));
  const std::string resumed = run_well(options + " --resume --workers 2");
  EXPECT_NE(resumed.find("resumed after step 15"), std::string::npos) << resumed;
  EXPECT_EQ(contents(folder.path() / "out/model.safetensors"), model);
  EXPECT_EQ(resumed.substr(resumed.find("\nthe best model")), text.substr(text.find("\nthe best model")));
}

TEST_F(TrainImage, TakesATenthForTheTest) {
  write_images(folder.path() / "data", 15);
  const std::string text = run_well("--data data --batch 8 --epochs 0.4 --size 16");
  EXPECT_NE(text.find("27 images for training and 3 for the test"), std::string::npos) << text;
}

TEST_F(TrainImage, ExplainsWhatIsWrong) {
  write_images(folder.path() / "few", 2);
  fs::create_directories(folder.path() / "none");
  std::ofstream(folder.path() / "none/train-images-idx3-ubyte.gz") << "not compressed";
  const auto refused = [&](const std::string& options, int status, const std::string& text) {
    testing_support::expect_refused(run(options), options, status, text);
  };
  refused("--data nowhere", 1, "train_image: cannot open the folder nowhere");
  refused("--data few", 1, "expected at least 10 images, as a tenth is for the test, got 4");
  refused("--data none", 1, "train-images-idx3-ubyte.gz: expected an IDX file");
  refused("--resume", 2, "--resume: expected --checkpoint FOLDER with it");
  refused("--model vgg", 2, "--model");
}

}  // namespace train_image_test
