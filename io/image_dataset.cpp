#include <algorithm>
#include <cctype>
#include <cmath>
#include <memory>
#include <system_error>
#include <utility>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/io/file.h>
#include <mica/io/image_dataset.h>

namespace mica::io {

namespace {

namespace fs = std::filesystem;

bool is_image_file(const fs::directory_entry& entry) {
  std::string extension = entry.path().extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return (extension == ".png" || extension == ".jpg" || extension == ".jpeg") &&
         !entry.path().filename().string().starts_with('.') && entry.is_regular_file();
}

std::vector<fs::path> image_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (is_image_file(entry)) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<fs::path> class_folders(const fs::path& folder) {
  std::vector<fs::path> classes;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory() && !entry.path().filename().string().starts_with('.')) {
      classes.push_back(entry.path());
    }
  }
  std::sort(classes.begin(), classes.end());
  return classes;
}

// The share of the first image that a pair's first image gets, and how it is mixed.
struct Mixture {
  bool cuts;
  Region region;  // with cuts: what the images exchange
  double share;
};

Mixture mixture_of(const ImageDatasetOptions& options, const Shape& shape, SampleRandom& random) {
  const bool has_both = options.mix_up > 0 && options.cut_mix > 0;
  Mixture mixture{options.cut_mix > 0 && !(has_both && random.chance(0.5)), {}, 0};
  mixture.share = random.beta(mixture.cuts ? options.cut_mix : options.mix_up);
  if (mixture.cuts) {
    // A rectangle of the image's proportions around a random point, cut off at the image's edges.
    const std::int64_t height = shape[1], width = shape[2];
    const double scale = std::sqrt(1 - mixture.share) / 2;
    const auto half_height = static_cast<std::int64_t>(scale * static_cast<double>(height)),
               half_width = static_cast<std::int64_t>(scale * static_cast<double>(width));
    const std::int64_t y = random.below(height), x = random.below(width);
    Region& region = mixture.region;
    region.top = std::max<std::int64_t>(y - half_height, 0);
    region.left = std::max<std::int64_t>(x - half_width, 0);
    region.height = std::min(y + half_height, height) - region.top;
    region.width = std::min(x + half_width, width) - region.left;
    mixture.share = 1 - static_cast<double>(region.height * region.width) / static_cast<double>(height * width);
  }
  return mixture;
}

// Replaces a and b by share · a + (1 − share) · b and the opposite.
void mix_pair(float* a, float* b, std::int64_t count, double share) {
  const auto weight = static_cast<float>(share);
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = a[i], y = b[i];
    a[i] = weight * x + (1 - weight) * y;
    b[i] = weight * y + (1 - weight) * x;
  }
}

// Exchanges a region of two images of this shape.
void exchange(std::byte* a, std::byte* b, const Shape& shape, std::size_t element, const Region& region) {
  for (std::int64_t c = 0; c < shape[0]; ++c) {
    for (std::int64_t y = region.top; y < region.top + region.height; ++y) {
      const std::size_t at = static_cast<std::size_t>((c * shape[1] + y) * shape[2] + region.left) * element;
      std::swap_ranges(a + at, a + at + static_cast<std::size_t>(region.width) * element, b + at);
    }
  }
}

}  // namespace

LabeledImages image_folder(const fs::path& folder, const ImageOptions& options) {
  check_folder(folder, "image_folder");
  LabeledImages images;
  const auto files = std::make_shared<std::vector<fs::path>>();
  try {
    for (const fs::path& of_class : class_folders(folder)) {
      const std::vector<fs::path> found = image_files(of_class);
      check(!found.empty(), "image_folder: expected PNG or JPEG files in {}, got none", of_class.string());
      images.labels.insert(images.labels.end(), found.size(), static_cast<std::int64_t>(images.classes.size()));
      images.classes.push_back(of_class.filename().string());
      files->insert(files->end(), found.begin(), found.end());
    }
  } catch (const fs::filesystem_error& error) {
    fail("image_folder: {}: {}", error.path1().string(), error.code().message());
  }
  check(!images.classes.empty(), "image_folder: expected a folder for each class in {}, got none", folder.string());
  images.image = [files, options](std::int64_t i) {
    return Image::read(files->at(static_cast<std::size_t>(i)), options);
  };
  return images;
}

LabeledImages labeled_images(const Tensor& images, const Tensor& labels, std::vector<std::string> classes) {
  const int dim = images.dim();
  check((dim == 3 || dim == 4) && (images.dtype() == uint8 || images.dtype() == float32) && images.device().is_cpu() &&
            labels.dim() == 1 && labels.size(0) == images.size(0) && !is_floating(labels.dtype()),
        "labeled_images: expected images (N, H, W) or (N, C, H, W) of uint8 or float32, and labels (N) of an integer "
        "dtype, on the CPU, got {} of {} and {} of {}",
        images.shape(), images.dtype(), labels.shape(), labels.dtype());
  LabeledImages result{std::move(classes), to_vector<std::int64_t>(labels), {}};
  const std::int64_t most = result.labels.empty() ? 0 : *std::max_element(result.labels.begin(), result.labels.end());
  if (result.classes.empty()) {
    check(most < 1'000'000, "labeled_images: expected at most a million classes, got the label {}", most);
    for (std::int64_t i = 0; i <= most; ++i) {
      result.classes.push_back(fmt::format("{}", i));
    }
  }
  for (const std::int64_t label : result.labels) {
    check(label >= 0 && label < static_cast<std::int64_t>(result.classes.size()),
          "labeled_images: expected labels in [0, {}), got {}", result.classes.size(), label);
  }
  const std::int64_t channels = dim == 3 ? 1 : images.size(1), height = images.size(-2), width = images.size(-1);
  const Tensor kept = contiguous_data(images);
  const std::int64_t offset = kept.handle()->offset;
  result.image = [=](std::int64_t i) {
    check(i >= 0 && i < kept.size(0), "labeled_images: expected an index in [0, {}), got {}", kept.size(0), i);
    const std::int64_t size = channels * height * width;
    return Image(as_strided(kept, {channels, height, width}, {height * width, width, 1}, offset + i * size));
  };
  return result;
}

ImageDataset::ImageDataset(LabeledImages images, ImageDatasetOptions options)
    : images_(std::move(images)), options_(std::move(options)) {
  check(images_.size() >= 1, "ImageDataset: expected at least one image, got none");
  check(options_.mix_up >= 0 && options_.cut_mix >= 0 && std::isfinite(options_.mix_up + options_.cut_mix),
        "ImageDataset: expected parameters of at least 0 for mixing, got {} and {}", options_.mix_up, options_.cut_mix);
  const Tensor first = transformed(0, 0);
  pixels_ = {first.shape(), first.dtype()};
  check(options_.mix_up == 0 || pixels_.dtype == float32,
        "ImageDataset: expected images of float32 to mix, got {}; Normalize{{}} makes them", pixels_.dtype);
}

Tensor ImageDataset::transformed(std::int64_t index, std::int64_t epoch) const {
  SampleRandom random(options_.seed, epoch, index);
  const Image image = images_.image(index);
  return options_.transform ? options_.transform(image, random).pixels() : image.pixels();
}

std::vector<Dataset::Field> ImageDataset::fields() const {
  const auto classes = static_cast<std::int64_t>(images_.classes.size());
  return {pixels_, mixes() ? Field{{classes}, float32} : Field{{}, int64}};
}

void ImageDataset::read(std::int64_t index, std::int64_t epoch, const Sample& to) const {
  const Tensor image = transformed(index, epoch);
  check(image.shape() == pixels_.shape && image.dtype() == pixels_.dtype,
        "ImageDataset: expected transformed images of shape {} and {}, like the first one, got {} and {} for image {}",
        pixels_.shape, pixels_.dtype, image.shape(), image.dtype(), index);
  std::copy_n(image.raw_data(), image.bytes(), to.bytes(0).data());
  const std::int64_t label = images_.labels[static_cast<std::size_t>(index)];
  if (mixes()) {
    const std::span<float> probabilities = to.field<float>(1);
    std::fill(probabilities.begin(), probabilities.end(), 0.0f);
    probabilities[static_cast<std::size_t>(label)] = 1;
  } else {
    to.field<std::int64_t>(1)[0] = label;
  }
}

void ImageDataset::finish(const Tensors& batch, const DataPosition& at) const {
  if (!mixes()) {
    return;
  }
  for (std::int64_t row = 0; row + 1 < batch[0].size(0); row += 2) {
    // Not the numbers of the transforms, which use the same seed.
    SampleRandom random(~options_.seed, at.epoch, at.index + row);
    const Mixture mixture = mixture_of(options_, pixels_.shape, random);
    const Sample first(batch, row), second(batch, row + 1);
    if (mixture.cuts) {
      exchange(first.bytes(0).data(), second.bytes(0).data(), pixels_.shape, size_of(pixels_.dtype), mixture.region);
    } else {
      mix_pair(first.field<float>(0).data(), second.field<float>(0).data(), numel_of(pixels_.shape), mixture.share);
    }
    mix_pair(first.field<float>(1).data(), second.field<float>(1).data(),
             static_cast<std::int64_t>(images_.classes.size()), mixture.share);
  }
}

}  // namespace mica::io
