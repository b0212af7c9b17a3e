#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <mica/io/data_loader.h>
#include <mica/io/image.h>
#include <mica/io/transforms.h>

namespace mica::io {

/// Images with labels, wherever they are.
struct LabeledImages {
  std::vector<std::string> classes;            ///< their names
  std::vector<std::int64_t> labels;            ///< of each image: the index of its class
  std::function<Image(std::int64_t i)> image;  ///< called by several threads at a time

  std::int64_t size() const { return static_cast<std::int64_t>(labels.size()); }
};

/// A folder with a folder for each class, which has the class's PNG and JPEG files (.png, .jpg, .jpeg, in any case),
/// also in folders of its own. Classes and files are sorted by name. Files whose name begins with a dot are ignored.
/// The files' contents are read when they are used. Throws an Error if there is no class or a class without images.
LabeledImages image_folder(const std::filesystem::path& folder, const ImageOptions& options = {});

/// Images (N, H, W) or (N, C, H, W), uint8 or float32, with labels (N) of uint8, int32 or int64, on the CPU, as in
/// MNIST's files: labeled_images(read_idx(…), read_idx(…)). Keeps the images. Without names, classes are "0", "1", ….
/// Throws an Error unless shapes and dtypes match and labels are ≥ 0 and, if there are names, less than their number.
LabeledImages labeled_images(const Tensor& images, const Tensor& labels, std::vector<std::string> classes = {});

struct ImageDatasetOptions {
  /// Must give images of the same size and dtype for all. By default, images stay as they are.
  ImageTransform transform{};
  std::uint64_t seed = 0;  ///< of the transforms' random numbers

  /// With one of these, images in a batch are mixed in pairs, the first with the second, the third with the fourth, …,
  /// and labels become probabilities (classes), float32. Both are the parameter of a symmetric beta distribution, which
  /// is that of an image's share. With both, either is used for half of the pairs.
  double mix_up = 0;   ///< weighted means (Zhang et al. 2017, arXiv:1710.09412); needs images of float32
  double cut_mix = 0;  ///< a rectangle of the other image (Yun et al. 2019, arXiv:1905.04899)
};

/// Labeled images, transformed by functions of (seed, epoch, index). The fields of a sample are the image (C, H, W) and
/// its label, int64.
///
///     const io::ImageDataset data(io::image_folder("train"), {.transform = augment, .seed = 1});
///     io::DataLoader loader(data, {.batch = 64, .seed = 1, .workers = 8});
///
/// Mixed pairs do not depend on the number of workers; nor on that of ranks, if each has an even number of rows.
class ImageDataset : public Dataset {
 public:
  /// Transforms the first image, to know the size. Throws an Error if there are no images or options are out of range.
  explicit ImageDataset(LabeledImages images, ImageDatasetOptions options = {});

  const LabeledImages& images() const { return images_; }
  std::int64_t size() const override { return images_.size(); }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, std::int64_t epoch, const Sample& to) const override;
  void finish(const Tensors& batch, const DataPosition& at) const override;

 private:
  Tensor transformed(std::int64_t index, std::int64_t epoch) const;
  bool mixes() const { return options_.mix_up > 0 || options_.cut_mix > 0; }

  LabeledImages images_;
  ImageDatasetOptions options_;
  Field pixels_;
};

}  // namespace mica::io
