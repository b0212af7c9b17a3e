#include "examples/train_image/data.h"

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/file.h>
#include <mica/io/idx.h>

using namespace mica;

namespace {

namespace fs = std::filesystem;

// The file, or its compressed version.
fs::path idx_file(const fs::path& folder, const std::string& name) {
  return io::is_there(folder / name) ? folder / name : folder / (name + ".gz");
}

io::LabeledImages idx_images(const fs::path& folder, const std::string& part, const std::vector<std::string>& classes) {
  const Tensor images = io::read_idx(idx_file(folder, part + "-images-idx3-ubyte"));
  return io::labeled_images(images, io::read_idx(idx_file(folder, part + "-labels-idx1-ubyte")), classes);
}

// Those whose index is, or is not, 9 modulo 10.
io::LabeledImages tenth(const io::LabeledImages& images, bool is_test) {
  const auto indices = std::make_shared<std::vector<std::int64_t>>();
  io::LabeledImages part{images.classes, {}, {}};
  for (std::int64_t i = 0; i < images.size(); ++i) {
    if ((i % 10 == 9) == is_test) {
      indices->push_back(i);
      part.labels.push_back(images.labels[static_cast<std::size_t>(i)]);
    }
  }
  part.image = [indices, image = images.image](std::int64_t i) {
    return image(indices->at(static_cast<std::size_t>(i)));
  };
  return part;
}

}  // namespace

ImageData read_image_data(const std::string& name) {
  const fs::path folder = name;
  io::check_folder(folder, "train_image");
  if (io::is_there(idx_file(folder, "train-images-idx3-ubyte"))) {
    std::vector<std::string> classes;
    if (name.find("fashion") != std::string::npos) {
      classes = {"T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot"};
    }
    return {idx_images(folder, "train", classes), idx_images(folder, "t10k", classes)};
  }
  for (const char* const test : {"test", "val"}) {
    if (io::is_there(folder / "train") && io::is_there(folder / test)) {
      ImageData data{io::image_folder(folder / "train"), io::image_folder(folder / test)};
      check(data.training.classes == data.test.classes, "{}: expected the same classes in train and in {}", name, test);
      return data;
    }
  }
  const io::LabeledImages all = io::image_folder(folder);
  check(all.size() >= 10, "{}: expected at least 10 images, as a tenth is for the test, got {}", name, all.size());
  return {tenth(all, false), tenth(all, true)};
}

Transforms transforms_for(const io::LabeledImages& images, std::int64_t size) {
  const io::Image first = images.image(0);
  const bool is_gray = first.channels() == 1;
  const io::Normalize normalize =
      is_gray ? io::Normalize{{0.286}, {0.353}} : io::Normalize{{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}};
  if (size == 0) {
    const io::RandomCrop shift{first.height(), first.width(), first.height() / 14};
    return {io::in_order({shift, io::RandomFlip{}, normalize}), normalize};
  }
  const io::RandomResizedCrop part{.height = size, .area = {0.35, 1}};
  return {io::in_order({part, io::RandomFlip{}, normalize}),
          io::in_order({io::Resize{size * 8 / 7}, io::CenterCrop{size}, normalize})};
}
