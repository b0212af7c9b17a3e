#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/io/image_dataset.h>

/// What a model makes of the images of a test, in their order.
struct Predictions {
  std::vector<std::int64_t> classes;  ///< the most probable one of each image
  std::vector<float> probabilities;   ///< of it

  /// Adds those of a batch of logits (N, classes).
  void add(const mica::Tensor& logits);
};

/// The share of right predictions.
double accuracy(const Predictions& predictions, const std::vector<std::int64_t>& labels);

/// A table with a row for each class: how many of its images were taken for each class, and the share that was right.
std::string confusion_table(const Predictions& predictions, const mica::io::LabeledImages& images);

/// An SVG picture of at most `most` wrong predictions, the most confident first, each with the class that was predicted
/// and the right one.
std::string picture_of_mistakes(const Predictions& predictions, const mica::io::LabeledImages& images,
                                std::size_t most = 60);
