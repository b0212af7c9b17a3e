// Trains a classifier of images: on Fashion-MNIST, or on any folder of images.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "examples/common/command_line.h"
#include "examples/common/ranks.h"
#include "examples/train_image/data.h"
#include "examples/train_image/report.h"
#include <mica/mica.h>

using namespace mica;

namespace {

/// The settings of a run: --help explains them.
struct Options {
  std::string data = "/usr/share/datasets/fashion-mnist", model = "cnn", device = "auto", dtype = "auto";
  std::string out = "image", tensorboard{};
  train::CheckpointOptions checkpoint{};
  std::int64_t size = 0, batch = 128;
  double epochs = 12, lr = 3e-3, weight_decay = 0.02;
  std::uint64_t seed = 1;
  int threads = 0, workers = 1;
};

/// Two convolutions and two linear layers, for small images.
struct Cnn : nn::Module {
  nn::Conv2d conv1, conv2;
  nn::BatchNorm2d norm1, norm2;
  nn::Linear hidden, output;

  Cnn(const Shape& image, std::int64_t classes)
      : conv1(child("conv1", nn::Conv2d{image[0], 32, 3, {.padding = 1, .bias = false}})),
        conv2(child("conv2", nn::Conv2d{32, 64, 3, {.padding = 1, .bias = false}})),
        norm1(child("norm1", nn::BatchNorm2d{32})),
        norm2(child("norm2", nn::BatchNorm2d{64})),
        hidden(child("hidden", nn::Linear{64 * (image[1] / 4) * (image[2] / 4), 128})),
        output(child("output", nn::Linear{128, classes})) {}

  Tensor operator()(const Tensor& x) const {
    const Tensor a = max_pool2d(norm1.with_relu(conv1(x)), 2);
    const Tensor b = max_pool2d(norm2.with_relu(conv2(a)), 2);
    return output(dropout(relu(hidden(reshape(b, {b.size(0), -1}))), 0.3, is_training()));
  }
};

/// Counts the right predictions of a validation, on the device and over all ranks.
class Accuracy {
 public:
  Accuracy(Device device, const distributed::Group& group) : group_(group), counts_(zeros({2}, float64, device)) {}

  void add(const Tensor& logits, const Tensor& labels) {
    const Tensor right = sum(eq(argmax(logits, -1), labels).to(float64));
    counts_ = counts_ + stack({right, full_like(right, static_cast<double>(labels.numel()))});
  }
  /// Since the last call.
  double take() {
    group_.all_reduce(counts_);
    const std::vector<double> counts = to_vector<double>(counts_);
    counts_ = zeros_like(counts_);
    return counts[0] / counts[1];
  }

 private:
  const distributed::Group& group_;
  Tensor counts_;
};

template <class Model>
void train_model(Model& model, const ImageData& data, const Transforms& transforms, const Options& o, Device device) {
  const distributed::Group group = distributed::world();
  const DType dtype = dtype_named(o.dtype, device);
  model.to(device, dtype);
  const io::ImageDataset training(data.training, {.transform = transforms.training, .seed = o.seed});
  const io::ImageDataset test(data.test, {.transform = transforms.test});
  train::DatasetBatches batches(training, {.batch = o.batch, .seed = o.seed, .workers = o.workers, .device = device},
                                group);
  Accuracy right(device, group);
  const auto loss = [&](const Tensors& batch) {
    const Tensor logits = model(batch[0].to(dtype));
    if (!model.is_training()) {
      right.add(logits, batch[1]);
    }
    return cross_entropy(logits, batch[1], {.label_smoothing = model.is_training() ? 0.05 : 0});
  };

  const auto epoch = std::max<std::int64_t>(1, training.size() / o.batch);
  const auto steps = std::max<std::int64_t>(1, std::llround(o.epochs * static_cast<double>(epoch)));
  optim::AdamW optimizer(optim::AdamW::decay_matrices(model.parameters(), {.weight_decay = o.weight_decay}));
  const optim::CosineSchedule schedule{.peak = o.lr, .floor = o.lr / 100, .warmup = steps / 10, .total = steps};
  train::TrainerOptions options{.steps = steps,
                                .eval_every = epoch,
                                .out = o.out,
                                .tensorboard = o.tensorboard,
                                .checkpoint = o.checkpoint,
                                .unit = "images",
                                .group = group,
                                .names = {.program = "train_image", .prefix = "--"}};
  options.step.schedule = [&](std::int64_t step) { return schedule.lr(step); };
  options.validation = train::Validation(test, {.batch = 4 * o.batch, .device = device, .workers = o.workers}, group);
  options.settings = {{"data", fmt::format("{} images of {}", training.size(), o.data)},
                      {"model", o.model},
                      {"size", fmt::format("{}", o.size)},
                      {"batch", fmt::format("{}", o.batch)},
                      {"lr", fmt::format("{}", o.lr)},
                      {"weight-decay", fmt::format("{}", o.weight_decay)},
                      {"seed", fmt::format("{}", o.seed)}};
  train::MetricsLog* log = nullptr;
  options.after_validation = [&](std::int64_t step) {
    const double share = right.take();
    if (log != nullptr) {
      log->scalar("accuracy/test", share, step);
    }
    return fmt::format("epoch {:.3g}: {:.2f} % of the test images are right",
                       static_cast<double>(step) / static_cast<double>(epoch), 100 * share);
  };
  train::Trainer trainer(model, loss, batches, optimizer, options);
  log = trainer.log();
  const train::Outcome outcome = trainer.run();
  put(trainer.summary(outcome));
  if (outcome.best.step == 0 || group.rank() != 0) {
    return;
  }
  model.load_state_dict(io::load(o.out + "/model.safetensors"));
  const nn::Evaluation guard;
  Predictions predictions;
  const io::DataLoader loader(test, {.batch = 4 * o.batch, .shuffle = false, .workers = o.workers, .device = device});
  for (const Tensors& batch : loader.epoch(0)) {
    predictions.add(model(batch[0].to(dtype)));
  }
  put(fmt::format("\nthe best model: {:.2f} % of {} test images are right\n{}",
                  100 * accuracy(predictions, data.test.labels), test.size(),
                  data.test.classes.size() <= 20 ? confusion_table(predictions, data.test) : ""));
  io::write_text(o.out + "/mistakes.svg", picture_of_mistakes(predictions, data.test));
  put(fmt::format("wrote {}/mistakes.svg\n", o.out));
}

void run(const Options& o) {
  const distributed::Group group = distributed::world();
  train::share_cores(group);
  set_num_threads(o.threads > 0 ? o.threads : num_threads());
  const Device device = device_named(o.device);
  const train::ProgressBar progress(group.rank() == 0);
  const ImageData data = read_image_data(o.data);
  const Transforms transforms = transforms_for(data.training, o.size);
  io::SampleRandom random(o.seed, 0, 0);
  const Shape shape = transforms.test(data.training.image(0), random).pixels().shape();
  const auto classes = static_cast<std::int64_t>(data.training.classes.size());
  fmt::print("data: {}, {} images for training and {} for the test, {} classes, {} × {} pixels\n", o.data,
             data.training.size(), data.test.size(), classes, shape[1], shape[2]);
  manual_seed(o.seed);
  if (o.model == "cnn") {
    Cnn model(shape, classes);
    train_model(model, data, transforms, o, device);
  } else {
    nn::ResNet model({.depth = 18, .classes = classes, .channels = shape[0], .small_images = shape[1] <= 64});
    train_model(model, data, transforms, o, device);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine line("Trains a classifier of images, on Fashion-MNIST or on any folder of images.", "train_image");
  Options o;
  line.add_option("--data", o.data,
                  "A folder with the files of MNIST or Fashion-MNIST (Debian: dataset-fashion-mnist); or with the "
                  "folders train and test, each with a folder of PNG or JPEG files for each class; or with a folder "
                  "for each class, of which a tenth is for the test")
      .show_default();
  line.add_option("--model", o.model, "cnn (two convolutions) or resnet18").one_of({"cnn", "resnet18"});
  line.add_option("--size", o.size,
                  "Height and width that images are resized to, such as 224 (default: as they are; all must have the "
                  "same size)")
      .between(8, 4096);
  line.add_option("--epochs", o.epochs, "Passes over the training images").positive().show_default();
  line.add_option("--batch", o.batch, "Images per step, all ranks together").at_least(1).show_default();
  line.add_option("--lr", o.lr, "Peak learning rate").positive().show_default();
  line.add_option("--weight-decay", o.weight_decay, "AdamW weight decay, of matrices only").at_least(0).show_default();
  line.add_option("--seed", o.seed, "Random seed").between(0, 1e18).show_default();
  line.add_option("--device", o.device, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"});
  line.add_option("--dtype", o.dtype, "float32, float16, bfloat16 or auto")
      .one_of({"auto", "float32", "float16", "bfloat16"});
  line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  line.add_option("--workers", o.workers, "Threads that read and augment images; they do not change the batches")
      .between(0, 256);
  line.add_option("--out", o.out, "Folder for the model, the metrics and the pictures").show_default();
  line.add_option("--tensorboard", o.tensorboard, "Folder for a TensorBoard event file");
  line.add_option("--checkpoint", o.checkpoint.folder, "Folder for checkpoints (default: none)");
  line.add_flag("--resume", o.checkpoint.resume, "Continue from the newest checkpoint, to the same bits");
  return line.run(argc, argv, [&] {
    if (o.checkpoint.resume && o.checkpoint.folder.empty()) {
      throw UsageError("--resume: expected --checkpoint FOLDER with it");
    }
    const int ranks = distributed::world().size();
    if (o.out.empty() || o.batch % ranks != 0) {
      throw UsageError(o.out.empty()
                           ? "--out: expected a folder, got nothing"
                           : fmt::format("--batch: expected a multiple of the {} ranks, got {}", ranks, o.batch));
    }
    run(o);
  });
}
