#pragma once

#include <cstdint>
#include <string>

#include <mica/io/image_dataset.h>

/// What to train on, and what to test on.
struct ImageData {
  mica::io::LabeledImages training, test;
};

/// Reads a folder, which has one of:
/// - the four files of MNIST or Fashion-MNIST, train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte
///   and t10k-labels-idx1-ubyte, also compressed (.gz);
/// - the folders train and test (or val), each with a folder of PNG and JPEG files for each class;
/// - a folder of files for each class, of which every tenth file is for the test.
/// Throws Error, naming the folder, if it has none of them.
ImageData read_image_data(const std::string& folder);

/// The transforms for training and for tests. Images of `size` pixels keep it; with 0, they must all have the same
/// size. Training uses random parts and mirrored images.
struct Transforms {
  mica::io::ImageTransform training, test;
};
Transforms transforms_for(const mica::io::LabeledImages& images, std::int64_t size);
